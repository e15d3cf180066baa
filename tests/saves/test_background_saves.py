"""Saves that are written while training continues contain exactly the rows at the moment the save was started."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tables
import torch
from batches import numbered
from collection_factory import apply, bag_config, bags_collection
from embeddings import SGD, embedding_of
from forking import fork, sleeping_child
from tables import ADAGRAD, WINDOWS, assert_same, contents, delta, loaded, make, save, train, trained
from training import rows_of, train_step

import rec_sdk_torch as rst
from rec_sdk_torch.rules import Count, Idle, Rows
from rec_sdk_torch.saves.format import manifest
from rec_sdk_torch.saves.save import save_writer
from rec_sdk_torch.saves.save.job import SaveJob
from rec_sdk_torch.tbe import TableBatchedEmbedding, TableLifecycle
from rec_sdk_torch.tbe.cache.batch import IdSignals
from rec_sdk_torch.tbe.rows import snapshot

LIFE = TableLifecycle(admission=Count(2), eviction=Idle(3), every=2, bound=Rows(25), keep_evicted=True)
HASHED = ("a", "c")


def with_lifecycle(cache: int) -> TableBatchedEmbedding:
    """Builds the tables of `make`, with hash tables that admit and evict ids."""
    configs = tables.configs()
    for config in configs:
        if config.hashed:
            object.__setattr__(config, "lifecycle", LIFE)
    return embedding_of(*configs, optimizer=ADAGRAD, cache=cache)


def counted(embedding: TableBatchedEmbedding) -> dict[str, Any]:
    """Returns the id counters of each table."""
    result: dict[str, Any] = {}
    for name in HASHED:
        view = embedding.view(name)
        if view.config.lifecycle is None:
            continue
        ids = view.ids()
        columns = dict(sorted(view.row_columns(ids).items()))
        rows = zip(*(values.tolist() for values in columns.values()), strict=True)
        result[name] = dict(zip(ids.tolist(), rows, strict=True))
        waiting, of_waiting = view.candidates()
        result[f"{name}.candidates"] = (waiting.tolist(), {key: each.tolist() for key, each in of_waiting.items()})
        result[f"{name}.clocks"] = view.clocks()
        left = [(each.ids.tolist(), each.weight.tolist()) for each in view.pending_evicted_rows()]
        result[f"{name}.left"] = [row for ids_left, weights in left for row in zip(ids_left, weights, strict=True)]
    return result


def test_a_snapshot_is_closed_between_updates(tmp_path: Path) -> None:
    """An update holds the launch lock while it copies rows to its tables' snapshots."""
    embedding = trained(1)
    view = embedding.view("a")
    opened = snapshot.Snapshot(view, snapshot.CopyOnWriteBuffer(tmp_path, 1000))
    snapshots = view.locate()[0].snapshots
    closing = threading.Thread(target=opened.close)
    with embedding.layout.locks.launch:
        closing.start()
        closing.join(0.2)
        assert snapshots
    closing.join(60)
    assert not snapshots


def small_pieces(monkeypatch: pytest.MonkeyPatch, between: Callable[[], object]) -> None:
    """Makes saves read rows in small pieces; `between` runs before each piece is written, while no lock is held."""
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", 200)
    monkeypatch.setattr(save_writer, "COPY_ON_WRITE_BYTES", 1000)
    pieces = snapshot.Snapshot.chunks

    def slowly(self: snapshot.Snapshot) -> Iterator[snapshot.SnapshotRows]:
        for rows in pieces(self):
            between()
            yield rows

    monkeypatch.setattr(snapshot.Snapshot, "chunks", slowly)


def disturbance(source: TableBatchedEmbedding, seed: int) -> Callable[[], None]:
    """Returns a function that makes one random change per call: a step, removal, write or eviction."""
    random = np.random.default_rng(seed)
    count = iter(range(1000 * seed, 10**9))

    def change() -> None:
        kind = random.integers(0, 8)
        view = source.view(str(random.choice(["a", "b", "c", "d"])))
        ids = torch.from_numpy(random.choice(60, 5, replace=False))
        if kind == 0 and not source.layout.window_open():
            view.remove(ids)
        elif kind == 1 and not view.config.hashed:
            view.write(ids, {"weight": torch.full((5, view.config.embedding_dim), 7.0, dtype=view.config.weight_dtype)})
        elif kind == 2 and view.config.lifecycle is not None:
            view.evict()
            view.put_back(view.take_evicted(3))
        # two forwards of one batch: its rows are planned twice before their first update
        elif kind == 3 and not source.layout.window_open():
            batch = tables.batch(next(count))
            outputs = [source(*batch) for _ in range(2)]
            sum(output.square().sum() for output in outputs).backward()
        else:
            number = next(count)
            train(source, range(number, number + 1))

    return change


@pytest.mark.parametrize("case", ["adagrad", "window", "packs", "lifecycle"])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3))])
def test_a_save_has_the_state_at_its_start(
    case: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full save is written while tables change; the delta that follows is compared too."""

    def build(cache: int) -> TableBatchedEmbedding:
        return (
            with_lifecycle(cache)
            if case == "lifecycle"
            else make(ADAGRAD if case == "adagrad" else WINDOWS, cache=cache)
        )

    if case == "packs":
        monkeypatch.setattr(manifest, "MANY_TABLES", 1)
    source, target = build(9 + 10 * seed), build(33)
    train(source, range(7 + seed))
    for incremental in (False, True):
        job = SaveJob(source, tmp_path, incremental)
        then, counts = contents(source), counted(source)
        if not incremental:
            small_pieces(monkeypatch, disturbance(source, seed + 1))
        job.run()
        assert incremental or contents(source) != then  # the tables did change during the save
        assert_same(loaded(tmp_path, target), then)
        assert_same(counted(target), counts)
    with source.exclusive():
        assert not any(group.snapshots for group in source.groups)


def test_a_load_during_a_save_does_not_change_the_save(tmp_path: Path) -> None:
    source, other = trained(5), trained(range(50, 55))
    save(other, tmp_path / "other")
    job, then = SaveJob(source, tmp_path / "own", False), contents(source)
    assert_same(loaded(tmp_path / "other", source), other)
    job.run()
    assert_same(loaded(tmp_path / "own"), then)


def test_the_list_of_cached_rows_is_made_after_the_moment_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training does not wait for the list, which has no ids that were added since."""
    source = trained(3, cache=30)
    lists: list[Any] = []
    cached = snapshot.Snapshot.cached

    def listed(self: snapshot.Snapshot) -> Any:
        lists.append(cached(self))
        return lists[-1]

    monkeypatch.setattr(snapshot.Snapshot, "cached", listed)
    job, then = SaveJob(source, tmp_path, False), contents(source)
    assert not lists
    source.view("a").remove(source.view("a").ids()[:5])
    train(source, range(50, 60))
    job.run()
    assert len(lists) == 4
    assert all(len(each.ids) for each in lists)
    new = set(source.view("a").ids().tolist()) - set(then["a"])
    assert new & set(source.view("a").cached().ids.tolist())
    assert not new & set(lists[0].ids.tolist())
    assert_same(loaded(tmp_path), then)


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD], ids=["without states", "with states"])
def test_tables_with_a_new_layout_during_a_save(optimizer: Any, tmp_path: Path) -> None:
    """The log of removed ids is dropped with the old layout, so the next save is a full save."""
    source, ids = make(None), torch.arange(20)
    source.view("a").write(ids, {"weight": torch.ones(20, 4)})
    job = SaveJob(source, tmp_path, True)
    source.view("a").remove(ids[:5])
    source.set_optimizers(dict.fromkeys(range(4), rst.TableOptimizer.create(*optimizer)))
    job.run()
    first = loaded(tmp_path, optimizer=None)
    assert sorted(first.table_ids("a").tolist()) == list(range(20)), "the moment of the save"
    delta(source, tmp_path)
    assert_same(loaded(tmp_path, optimizer=optimizer), source)


@pytest.mark.parametrize("incremental", [False, True])
def test_training_continues_while_a_thread_writes(
    incremental: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = trained(4, cache=30)
    save(source, tmp_path)
    train(source, range(4, 6))
    then = contents(source)
    steps = threading.Semaphore(0)
    small_pieces(monkeypatch, lambda: steps.acquire(timeout=10))  # waits for at least one training step per piece
    future = rst.Saver().save(source, tmp_path, incremental, background=True)
    number = 10
    while not future.done():
        train(source, range(number, number + 1))
        number += 1
        steps.release()
    assert number > 20
    assert Path(future.result()).parent == tmp_path.resolve()
    assert_same(loaded(tmp_path), then)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_training_with_prefetch_continues_during_a_save(
    depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def collection() -> torch.nn.Module:
        config = bag_config("t0", ("f0",), num_embeddings=60, embedding_dim=4, is_incremental=True)
        model = torch.nn.ModuleList([bags_collection(torch.device("cpu"), config, cache=40)])
        apply(model, torch.optim.Adagrad, lr=0.1)
        return model

    def bytes_of(tables: torch.nn.Module) -> dict[int, bytes]:
        return {one: row.numpy().tobytes() for one, row in rows_of(tables).items()}

    def steps() -> Iterator[Any]:
        for step in range(40):
            yield numbered(12, 9 * step % 48)

    source, plain = collection(), collection()
    saves: list[Any] = []
    between = threading.Semaphore(0)
    small_pieces(monkeypatch, lambda: between.acquire(timeout=10))
    for step, batch in enumerate(rst.prefetch(steps(), source, depth)):
        train_step(source[0], batch)
        between.release()
        if step in (7, 20):
            if saves:
                saves[-1][0].result(timeout=60)
            then = bytes_of(source[0])
            saves.append((rst.Saver().save(source, tmp_path / str(step), background=True), then))
    for _ in range(1000):
        between.release()
    for number, (future, then) in zip((7, 20), saves, strict=True):
        future.result(timeout=60)
        target = loaded(tmp_path / str(number), collection())
        assert bytes_of(target[0]) == then
        assert len(then) > 20
    for batch in steps():
        train_step(plain[0], batch)
    assert bytes_of(source[0]) == bytes_of(plain[0])


def test_rows_of_abandoned_plans_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MAX_EMPTY_PASSES", 2)
    source = trained(5)
    job, then = SaveJob(source, tmp_path, False), contents(source)
    indices, offsets = tables.batch(99)
    arguments: tuple[Any, ...] = (offsets, indices, offsets, 4, source._keys, None, False, IdSignals(None, None, None))
    call = source.queue.take(source.queue.batch(*arguments))
    assert any(group.engine.unapplied() for group in source.groups)
    job.run()
    del call
    assert_same(loaded(tmp_path), then)


def test_a_full_disk_fails_the_save_and_not_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, twin = trained(5), trained(5)
    monkeypatch.setattr(save_writer, "COPY_ON_WRITE_BYTES", 0)
    job = SaveJob(source, tmp_path, False)

    def full(**_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshot.tempfile, "TemporaryFile", full)
    for each in (source, twin):
        train(each, range(5, 8))
    assert_same(source, twin)
    with pytest.raises(RuntimeError, match="could not be copied for the save") as raised:
        job.run()
    assert isinstance(raised.value.__cause__, OSError)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    save(source, tmp_path)  # the failed save must leave nothing that hinders the next


def test_result_raises_the_error_of_a_background_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rec_sdk_torch.saves.save.job.publish_save", lambda *_: 1 / 0)
    future = rst.Saver().save(trained(), tmp_path, background=True)
    with pytest.raises(ZeroDivisionError):
        future.result(timeout=30)


def test_saving_in_a_child_forked_during_a_save_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child inherits the save's lock, but not the thread that would release it."""
    source = trained()
    save(make(), tmp_path / "first")
    go_on = threading.Semaphore(0)
    small_pieces(monkeypatch, lambda: go_on.acquire(timeout=60))
    future = rst.Saver().save(source, tmp_path / "a", background=True)
    work = {
        "save": lambda: save(source, tmp_path / "b"),
        "load": lambda: loaded(tmp_path / "first", source),
        "train": lambda: train(source, range(3, 4)),
    }
    children = {name: fork(each) for name, each in work.items()}
    with sleeping_child():  # the child must not keep the folder's lock either
        go_on.release(1000)
        future.result(timeout=60)
        delta(source, tmp_path / "a")
    for name, child in children.items():
        message = child.result()
        assert message.startswith("RuntimeError: process "), (name, message)
        assert "or saved them: locks and threads do not survive a fork" in message
    child = fork(lambda: save(source, tmp_path / "b").parent.name)
    assert child.result() == "b", "no save goes on: the child has a copy of the tables"
