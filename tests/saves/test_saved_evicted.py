"""Saves contain untaken evicted rows: each is returned once, also across a load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import odd_saves
import pytest
import torch
from embeddings import ADAGRAD, ADAM, embedding_of
from tables import delta, loaded, refused, save

import rec_sdk_torch as rst
from rec_sdk_torch.checkpoint.__main__ import main
from rec_sdk_torch.rules import Idle, Rows
from rec_sdk_torch.saves.format.manifest import EVICTED, read_manifest
from rec_sdk_torch.saves.save import job, save_writer
from rec_sdk_torch.tbe import EvictedRows, Pooling, TableBatchedEmbedding, TableConfig, TableLifecycle

LIFE = TableLifecycle(eviction=Idle(4), every=3, bound=Rows(20), keep_evicted=True)


def make(
    lifecycle: TableLifecycle = LIFE, optimizer: Any = ADAGRAD, device: Any = "cpu", cache: int = 16, **fields: Any
) -> TableBatchedEmbedding:
    tables = [
        TableConfig(name, 60, 4, pooling=Pooling.NONE, track_changes=True, lifecycle=lifecycle, **fields)
        for name in "ab"
    ]
    return embedding_of(*tables, optimizer=optimizer, cache=cache, device=device)


def train(embedding: TableBatchedEmbedding, steps: range) -> None:
    for step in steps:
        ids = torch.from_numpy(np.random.default_rng(step).integers(0, 90, 16))
        embedding(ids, torch.arange(0, 17, 8)).square().sum().backward()
        if step % 4 == 3:
            embedding.view("b").remove(ids[8:11])


def trained(steps: range = range(9), **options: Any) -> TableBatchedEmbedding:
    embedding = make(**options)
    train(embedding, steps)
    return embedding


def untaken(embedding: TableBatchedEmbedding) -> dict[str, Any]:
    """Returns the untaken rows as plain lists, without taking them."""
    result = {}
    for name in "ab":
        pieces = embedding.view(name).pending_evicted_rows()
        result[name] = [row for piece in pieces for row in listed(piece)]
    return result


def listed(rows: EvictedRows) -> list[tuple[Any, ...]]:
    parts = {"weight": rows.weight, **rows.states, **rows.columns, "reason": rows.reason}
    named = [(name, values.tolist()) for name, values in parts.items()]
    return [(i, *((name, values[place]) for name, values in named)) for place, i in enumerate(rows.ids.tolist())]


def take_all_evicted(embedding: TableBatchedEmbedding) -> dict[str, Any]:
    return {name: listed(embedding.view(name).take_evicted()) for name in "ab"}


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_load_has_the_rows_that_were_not_taken(
    incremental: bool, dtype: torch.dtype, device: torch.device, tmp_path: Path
) -> None:
    source = trained(range(5), device=device, weight_dtype=dtype)
    before = take_all_evicted(source)
    assert all(before.values())
    for begin in (5, 9, 13):
        train(source, range(begin, begin + 4))
        source.view("a").take_evicted(1)
        save(source, tmp_path, incremental)
    # its untaken rows are replaced
    target = loaded(tmp_path, trained(range(50, 60), device=device, cache=40, weight_dtype=dtype))
    assert all(untaken(source).values())
    assert untaken(target) == untaken(source)
    for embedding in (source, target):
        train(embedding, range(17, 21))
    assert take_all_evicted(target) == take_all_evicted(source)
    assert not any(take_all_evicted(target).values())
    assert torch.equal(target.view("a").ids().sort().values, source.view("a").ids().sort().values)


def rows_in(folder: Path, table: str) -> int:
    """Returns the number of evicted rows of a table that the save itself contains."""
    return sum(file.rows for file in read_manifest(folder).files_of(table, EVICTED))


@pytest.mark.parametrize("resumed", [False, True])
def test_a_delta_has_the_rows_evicted_since_the_previous_save(resumed: bool, tmp_path: Path) -> None:
    """Other rows are in previous saves, some or all of which may have been taken meanwhile."""
    source, random = make(), np.random.default_rng(5)
    written: list[tuple[Path, dict[str, Any]]] = []
    for step, at_most in enumerate([0, 0, 3, 1, 10_000, 0, 5]):
        before = {name: source.cache_stats(name)["evicted_waiting"] for name in "ab"}
        train(source, range(4 * step, 4 * step + 4))
        left = {name: source.cache_stats(name)["evicted_waiting"] - before[name] for name in "ab"}
        for name in "ab":
            source.view(name).take_evicted(at_most)
        folder = delta(source, tmp_path)
        kept = untaken(source)
        new = {name: rows_in(folder, name) for name in "ab"}
        assert new == {name: min(left[name], len(kept[name])) for name in "ab"}
        written.append((folder, kept))
        if resumed and random.random() < 0.5:
            source = loaded(tmp_path, make(cache=30))
    idle = delta(source, tmp_path)
    assert (rows_in(idle, "a"), rows_in(idle, "b")) == (0, 0)
    assert all(untaken(source).values())
    for folder, expected in [*written, (idle, untaken(source))]:
        assert untaken(loaded(folder, make())) == expected
        assert main(["verify", str(folder)]) == 0


def test_a_delta_that_needs_more_rows_than_there_are(tmp_path: Path) -> None:
    source = trained()
    delta(source, tmp_path)
    train(source, range(9, 10))
    folder = delta(source, tmp_path)
    target = trained(range(20, 30))
    then, body = untaken(target), odd_saves.body_of(folder)
    table = next(table for table in body["tables"] if table["name"] == "a")
    right = table["evicted_before"]
    assert body["version"] == 5
    for wrong, version, message in (
        ([right[0] + 1], 5, "1 evicted rows of table 'a' of rank 0 are not in"),
        ([*right, 1], 5, "evicted rows of 2 ranks in the previous save, expected 1"),
        (right, 4, "evicted rows are in the previous save, which requires format version 5"),
    ):
        table["evicted_before"] = wrong
        odd_saves.write_manifest(folder, body | {"version": version})
        refused(target, tmp_path, message)
        assert main(["verify", str(tmp_path)]) == 1
    assert untaken(target) == then


def test_rows_that_are_put_back_are_in_the_next_delta(tmp_path: Path) -> None:
    source = trained()
    delta(source, tmp_path)
    view = source.view("a")
    rows = view.take_evicted(3)
    view.put_back(rows)
    delta(source, tmp_path)
    target = loaded(tmp_path, make())
    its = target.view("a")
    assert bool(its.knows(rows.ids).all())
    assert torch.equal(its.read(rows.ids).parts["weight"], rows.weight)
    assert its.row_columns(rows.ids)["count"].tolist() == rows.columns["count"].tolist()
    assert untaken(target) == untaken(source)


def test_without_untaken_rows_no_file_is_written(tmp_path: Path) -> None:
    source = trained()
    take_all_evicted(source)
    assert EVICTED not in {file.role for file in read_manifest(save(source, tmp_path)).files}
    assert untaken(loaded(tmp_path, trained())) == {"a": [], "b": []}


def test_rows_taken_during_a_save_are_in_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = trained()
    take_all_evicted(source)
    source.view("a").remove(source.view("a").ids()[:5])  # the rows of one removal
    then = untaken(source)
    written = save_writer.write_snapshot

    def write_later(snapshot: save_writer.ModelSnapshot) -> save_writer.RankResult:
        rows = source.view("a").take_evicted()
        for values in (rows.ids, rows.weight, *rows.states.values()):
            values.fill_(7)  # the caller owns these tensors
        train(source, range(9, 14))
        return written(snapshot)

    monkeypatch.setattr(job, "write_snapshot", write_later)
    save(source, tmp_path)
    assert untaken(loaded(tmp_path, make())) == then


def test_a_table_without_keep_evicted_drops_saved_evicted_rows(tmp_path: Path) -> None:
    source, target = trained(), make(TableLifecycle(bound=Rows(20)))
    save(source, tmp_path)
    rows = len(untaken(source)["a"])
    with pytest.warns(UserWarning, match=f"{rows} evicted rows of table 'a' were not taken: they are not loaded"):
        loaded(tmp_path, target)
    assert target.view("a").count() == source.view("a").count()


def test_another_optimizer_has_states_of_new_rows(tmp_path: Path) -> None:
    source, target = trained(), make(TableLifecycle(eviction=Idle(5), keep_evicted=True), ADAM)
    save(source, tmp_path)
    with pytest.warns(UserWarning, match="only their weights are loaded"):
        loaded(tmp_path, target)
    theirs, ours = source.view("a").take_evicted(), target.view("a").take_evicted()
    assert torch.equal(ours.ids, theirs.ids)
    assert torch.equal(ours.weight, theirs.weight)
    assert ours.columns.keys() == {"last_use"}
    assert list(ours.states) == ["exp_avg", "exp_avg_sq"]
    assert not any(state.any() for state in ours.states.values())
    assert target.view("a").put_back(ours) == len(set(ours.ids.tolist()))


def test_a_failed_load_keeps_untaken_rows(tmp_path: Path) -> None:
    folder, target = save(trained(), tmp_path), trained(range(20, 30))
    then = untaken(target)
    file = next(file for file in read_manifest(folder).files if file.role == EVICTED)
    raw = bytearray((folder / file.path).read_bytes())
    raw[-1] ^= 1
    (folder / file.path).write_bytes(bytes(raw))
    refused(target, tmp_path, "evicted")
    assert untaken(target) == then


def test_reset_rows_are_not_returned_as_evicted(device: torch.device) -> None:
    rules = rst.AdmitAndEvictConfig(keep_evicted=True)
    config = rst.EmbCacheEmbeddingConfig(
        name="t0", feature_names=["f0"], num_embeddings=60, embedding_dim=4, admit_and_evict_config=rules
    )
    collection = rst.EmbCacheEmbeddingCollection([config], cache=8, device=device)
    rst.apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.1})
    view = collection.embedding.view("t0")
    view.write(torch.arange(4), {"weight": torch.ones(4, 4)})
    view.remove(torch.arange(2))
    collection.reset_parameters()
    assert len(collection.take_evicted("t0")) == 0
    assert collection.put_back("t0", EvictedRows(torch.arange(2), torch.ones(2, 4), {}, {}, torch.ones(2).byte())) == 2
    assert sorted(view.ids().tolist()) == [0, 1]
