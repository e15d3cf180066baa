"""Saves and loads need little memory in addition to the table, whatever the table's size."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from embeddings import embedding_of
from tables import delta, loaded, save

import rec_sdk_torch as rst

MOST = {1 << 19: 144 << 20, 1 << 21: 256 << 20}
"""The largest number of bytes by rows of half a kilobyte; about 80 MiB are used at any size."""


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """A measurement of the peak growth of this process's memory within a block."""

    def __enter__(self) -> Peak:
        self.bytes, self._before, self._stop = 0, resident(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self.bytes = max(self.bytes, resident() - self._before)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def table(rows: int) -> rst.TableBatchedEmbedding:
    config = rst.TableConfig("t", rows, 64, hashed=False, track_changes=True)
    return embedding_of(config, cache=1000)


@pytest.mark.parametrize("rows", [1 << 19, pytest.param(1 << 21, marks=pytest.mark.full)])
def test_memory_of_saving_and_loading_a_gigabyte(rows: int, tmp_path: Path) -> None:
    """Saves and loads 1 GiB of rows and states (256 MiB without --full), then saves a delta of half of the rows.

    Rows that are not written yet need no extra memory.
    """
    most = MOST[rows]
    source, target = table(rows), table(rows)
    for each in (source, target):
        each.view("t").count()
    with Peak() as saving:
        save(source, tmp_path)
    assert size_of(tmp_path) > rows << 9
    assert saving.bytes < most
    for begin in range(0, rows // 2, 1 << 16):
        source.view("t").write(torch.arange(begin, begin + (1 << 16)), {"weight": torch.ones(1 << 16, 64)})
    with Peak() as adding:
        delta(source, tmp_path)
    assert size_of(tmp_path) > 3 * rows << 8
    assert adding.bytes < most * 2 // 3  # less memory than the size of the delta
    with Peak() as loading:
        loaded(tmp_path, target)
    assert loading.bytes - target.memory_report()["host"] < most
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, rows, 100))
    assert torch.equal(target.view("t").read(ids).parts["weight"], source.view("t").read(ids).parts["weight"])
    peaks = [peak.bytes >> 20 for peak in (saving, adding, loading)]
    print(f"MiB beside the table: {peaks[0]} to save, {peaks[1]} to save a delta; with the table {peaks[2]} to load")


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*.safetensors"))
