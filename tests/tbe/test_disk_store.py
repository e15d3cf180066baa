"""Host stores on disk: files, locks, full disks. The oracle compares their results with stores in memory."""

from __future__ import annotations

import copy
import fcntl
import gc
import os
from pathlib import Path
from typing import Any

import embeddings
import forked_python
import pytest
import torch
from embeddings import ADAGRAD, one_table, weights_of

from rec_sdk_torch.tbe import TableBatchedEmbedding, TableOptimizer
from rec_sdk_torch.tbe.cache.store_folder import MARKER, FolderInUseError

DIM = 8


def make(folder: Path | None, device: Any = "cpu", *, hashed: bool = True, rows: int = 1000) -> TableBatchedEmbedding:
    options = {"hashed": hashed, "cache": 8, "seed": 3, "host_store": folder}
    return one_table(device, rows=rows, dim=DIM, optimizer=ADAGRAD, **options)


def train(embedding: TableBatchedEmbedding, ids: range) -> None:
    embeddings.train(embedding.train(), *torch.tensor(ids).split(8), bag=1, square=True)


def weights(embedding: TableBatchedEmbedding) -> torch.Tensor:
    return weights_of(embedding, range(100))


def rows_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.rows"))


@pytest.mark.parametrize("hashed", [True, False])
def test_training_on_disk_equals_training_in_memory(tmp_path: Path, device: torch.device, hashed: bool) -> None:
    on_disk, in_memory = make(tmp_path, device, hashed=hashed), make(None, device, hashed=hashed)
    for embedding in (on_disk, in_memory):
        train(embedding, range(100))
        train(embedding, range(50))
    assert torch.equal(weights(on_disk), weights(in_memory))
    report = on_disk.memory_report()
    assert report["host"] == 0, "rows are not in memory"
    record = 2 * 4 * DIM
    (file,) = rows_files(tmp_path)
    assert report["disk"] >= (100 if hashed else 1000) * record
    assert (tmp_path / file).stat().st_size == report["disk"] + 4096
    assert (tmp_path / file).stat().st_blocks * 512 >= report["disk"], "preallocated"
    on_disk.eval(), in_memory.eval()
    every = torch.arange(90), torch.arange(91)
    assert torch.equal(on_disk(*every), in_memory(*every))


def test_files_are_removed_with_their_tables(tmp_path: Path) -> None:
    embedding = make(tmp_path)
    assert rows_files(tmp_path) == [], "before the first use"
    train(embedding, range(20))
    assert len(rows_files(tmp_path)) == 1
    del embedding
    assert rows_files(tmp_path) == []
    train(make(tmp_path), range(20))  # the lock is free


def test_files_stay_when_a_forked_process_ends(tmp_path: Path) -> None:
    embeddings = [make(tmp_path)]
    train(embeddings[0], range(10))
    before = rows_files(tmp_path)
    child = os.fork()
    if child == 0:
        embeddings.clear()
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert rows_files(tmp_path) == before
    embeddings.clear()
    gc.collect()
    assert rows_files(tmp_path) == []


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    first, second = make(tmp_path), make(tmp_path)
    train(first, range(20))
    with pytest.raises(FolderInUseError, match=f"{tmp_path}.* used by process {os.getpid()}"):
        train(second, range(20))
    script = "import sys; from rec_sdk_torch.tbe.cache.store_folder import StoreFolder; StoreFolder(sys.argv[1])"
    other = forked_python.python("-c", script, str(tmp_path))
    assert "FolderInUseError" in other.stderr
    assert f"used by process {os.getpid()}" in other.stderr
    del first
    train(second, range(20))


def test_files_of_a_killed_process_are_removed_and_others_are_not(tmp_path: Path) -> None:
    (tmp_path / "t.7.rows").write_bytes(MARKER + bytes(10000))
    (tmp_path / "mine.rows").write_bytes(b"my own file")
    train(make(tmp_path), range(20))
    assert rows_files(tmp_path) == ["mine.rows"]


def test_a_foreign_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.0.rows").write_bytes(b"my own file")
    with pytest.raises(FileExistsError, match=r"table 't'.*cannot be created.*t\.0\.rows"):
        train(make(tmp_path), range(20))
    assert (tmp_path / "t.0.rows").read_bytes() == b"my own file"


def test_copies_have_folders_of_their_own(tmp_path: Path) -> None:
    embedding = make(tmp_path)
    train(embedding, range(60))
    twin, third = copy.deepcopy(embedding), copy.deepcopy(embedding)
    assert {twin.options.host_store, third.options.host_store} == {str(tmp_path / "copy1"), str(tmp_path / "copy2")}
    assert torch.equal(weights(twin), weights(embedding))
    train(twin, range(60))
    train(embedding, range(60))
    assert torch.equal(weights(twin), weights(embedding))
    assert not torch.equal(weights(third), weights(embedding))
    del twin
    assert copy.deepcopy(embedding).options.host_store == str(tmp_path / "copy1")


def test_removed_rows_start_anew_and_a_load_replaces_all(tmp_path: Path) -> None:
    embedding, fresh = make(tmp_path), make(None)
    train(embedding, range(60))
    saved = embedding.state_dict()
    before = embedding.memory_report()["disk"]
    assert embedding.view("t").remove(torch.arange(30)) == 30
    assert torch.equal(weights(embedding)[:30], weights(fresh)[:30])
    train(embedding, range(500, 530))
    assert embedding.memory_report()["disk"] == before, "freed places are used again"
    embedding.load_state_dict(saved)
    assert torch.equal(weights_of(embedding, range(60)), saved["t.weight"])


def test_another_optimizer_lays_the_rows_out_anew(tmp_path: Path) -> None:
    embedding = one_table(None, rows=1000, dim=DIM, optimizer=None, cache=8, host_store=tmp_path)
    embedding.view("t").write(torch.arange(40), {"weight": torch.arange(40.0 * DIM).view(40, DIM)})
    embedding.set_optimizers({0: TableOptimizer.create(*ADAGRAD)})
    assert torch.equal(weights(embedding)[:40], torch.arange(40.0 * DIM).view(40, DIM))
    assert len(rows_files(tmp_path)) == 1, "the file of the old layout is gone"


def test_meta_tables_touch_no_folder(tmp_path: Path) -> None:
    embedding = make(tmp_path / "absent", "meta")
    copy.deepcopy(embedding).state_dict()
    assert not (tmp_path / "absent").exists()


def test_a_full_disk_is_an_error_before_rows_change(tmp_path: Path) -> None:
    """A limit of 2 MiB on the size of files emulates a full disk."""
    script = f"""
import errno, resource, signal, sys, torch
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
from test_disk_store import make, train, weights
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))
for hashed in (True, False):
    embedding = make({str(tmp_path)!r} + str(hashed), hashed=hashed, rows=1000 if hashed else 10**6)
    try:
        train(embedding, range(100))
        before = weights(embedding)
        train(embedding, range(100, 100_000))
    except OSError as error:
        assert error.errno == errno.EFBIG and "table 't': its host store needs" in str(error), error
        if hashed:
            assert torch.equal(weights(embedding), before)
            train(embedding, range(100))  # the model stays usable
            assert not torch.equal(weights(embedding), before)
        print("refused")
"""
    run = forked_python.python("-c", script)
    assert run.stdout.endswith("refused\nrefused\n"), run.stderr  # torch_npu prints a warning before this line


def test_paths_are_checked() -> None:
    wrong: Any
    for wrong in (7, b"bytes"):
        with pytest.raises(TypeError, match="expected the path of a folder"):
            make(wrong)


def test_the_lock_is_visible_to_other_programs(tmp_path: Path) -> None:
    embedding = make(tmp_path)
    train(embedding, range(20))
    with open(tmp_path / ".lock") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
