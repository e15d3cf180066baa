"""Many small tables take little host memory, and the memory report states how much."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import embeddings
import pytest
import torch
from embeddings import embedding_of

from rec_sdk_torch.rules import Idle, Rows
from rec_sdk_torch.tbe import Pooling, TableBatchedEmbedding, TableConfig, TableLifecycle

PAGE = mmap.PAGESIZE
DIM = 4
RECORD = 2 * 4 * DIM
"""Bytes of a row with Adagrad's state."""

COLUMNS = {"version": 8, "count": 4, "last_use": 4}
"""Bytes per row of `track_changes` and of the rules in `make`."""


def make(
    device: torch.device, tables: int, rows: int, cache: int, hashed: bool = True, columns: bool = True
) -> TableBatchedEmbedding:
    lifecycle = TableLifecycle(eviction=Idle(1000), every=1000, bound=Rows(1000)) if hashed and columns else None
    configs = [
        TableConfig(f"t{t}", rows, DIM, pooling=Pooling.NONE, hashed=hashed, track_changes=columns, lifecycle=lifecycle)
        for t in range(tables)
    ]
    return embedding_of(*configs, cache=cache, device=device)


def train(embedding: TableBatchedEmbedding, tables: int, ids: torch.Tensor) -> None:
    embeddings.train(embedding, ids.repeat(tables), bag=1)


def store_all(embedding: TableBatchedEmbedding, tables: int, ids: torch.Tensor, cache: int) -> None:
    """Writes all rows to the host store, current except for the rows in the cache."""
    for _ in range(2):
        for part in ids.split(cache):
            train(embedding, tables, part)
    embedding.view("t0").read(ids[:1])  # completes pending write-backs


def resident() -> int:
    found = re.search(r"^Rss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="a system that does not count pages")
def test_many_small_tables(device: torch.device) -> None:
    """If each table and column used a huge page of its own, they would take 480 MiB."""
    tables, cache, ids = 60, 10, torch.arange(20)
    store_all(make(device, 1, 1000, cache), 1, ids, cache)
    before = resident()
    embedding = make(device, tables, 1000, cache)
    store_all(embedding, tables, ids, cache)
    assert embedding.memory_report()["host"] == tables * PAGE
    assert resident() - before < 64 << 20


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="a system that does not count pages")
def test_large_index_tables_with_few_rows(device: torch.device) -> None:
    """With huge pages, rows would take 1.2 GiB, and columns and slots 180 MiB."""
    tables, ids = 30, torch.arange(0, 1_000_000, 50_000)
    before = resident()
    embedding = make(device, tables, 1_000_000, 5, hashed=False)
    store_all(embedding, tables, ids, 5)
    assert embedding.memory_report()["host"] == tables * len(ids) * PAGE
    assert resident() - before < 64 << 20


def test_rows_without_gaps_take_what_they_need(device: torch.device) -> None:
    """Host memory is at most twice the size of the rows, even where the store switches to huge pages."""
    embedding = make(device, 1, 200_000, 10_000, columns=False)
    for end in (1_000, 30_000, 34_000, 100_000):
        train(embedding, 1, torch.arange(embedding.view("t0").count(), end)[-10_000:])
        view = embedding.view("t0")
        view.write(torch.arange(end), {"weight": torch.ones(end, DIM)})
        host = embedding.memory_report()["host"]
        assert end * RECORD - 10_000 * RECORD <= host <= max(2 * end * RECORD, PAGE), end


def test_columns_are_reported(device: torch.device) -> None:
    embedding = make(device, 2, 1000, 10)
    assert embedding.memory_report()["columns"] == 0, "before the first use"
    train(embedding, 2, torch.arange(7))
    total, one = embedding.memory_report()["columns"], embedding.memory_report("t1")["columns"]
    per_row = sum(COLUMNS.values())
    assert 7 * per_row < one <= 7 * per_row + 8 * 16, "with a log of 7 changes"
    assert total == one + embedding.memory_report("t0")["columns"]
    index = make(device, 1, 1000, 10, hashed=False)
    train(index, 1, torch.arange(7))
    assert 1000 * COLUMNS["version"] < index.memory_report()["columns"] <= 1000 * COLUMNS["version"] + 8 * 16
    plain = make(device, 1, 1000, 10, columns=False)
    train(plain, 1, torch.arange(7))
    assert plain.memory_report()["columns"] == 0
