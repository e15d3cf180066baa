"""After a failed load, the model is usable and either unchanged or empty.

It is empty only if memory did not suffice for both the previous rows and the save's.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import odd_saves
import pytest
import torch
from embeddings import embedding_of
from odd_saves import make, state_of, train
from tables import assert_same, loaded, save

import rec_sdk_torch as rst
from rec_sdk_torch.saves.load import capacity, save_reader
from rec_sdk_torch.tbe.cache.device_cache import Group


def before_a_load(**options: Any) -> rst.TableBatchedEmbedding:
    """Builds a model whose rows differ from the rows in the saves."""
    target = make(**options)
    train(target, range(50, 53))
    return target


@pytest.fixture
def saves(tmp_path: Path) -> tuple[Path, Any]:
    """Writes saves; returns their folder and the contents of the latest one."""
    return tmp_path, odd_saves.saved(tmp_path)[-1][1]


class FailingOpen:
    """A wrapper of `open_file` that fails when a load opens the n-th file with rows."""

    def __init__(self, number: int, error: BaseException) -> None:
        self.left, self.error, self.open_file = number, error, save_reader.open_file

    def __call__(self, *arguments: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.open_file(*arguments)


def files_read(saves: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    counting = FailingOpen(0, OSError())
    with monkeypatch.context() as patch:
        patch.setattr(save_reader, "open_file", counting)
        loaded(saves, make())
    return -counting.left


@pytest.mark.parametrize("error", [OSError("planted"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_unreadable_file_leaves_the_model_unchanged(
    error: BaseException, saves: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, saved = saves
    files = files_read(path, monkeypatch)
    assert files >= 7
    target = before_a_load()
    before = state_of(target)
    for number in range(1, files + 1):
        with monkeypatch.context() as patch:
            patch.setattr(save_reader, "open_file", FailingOpen(number, error))
            with pytest.raises(type(error)):
                loaded(path, target)
        assert_same(state_of(target), before)
    train(target, range(53, 54))
    assert_same(state_of(loaded(path, target)), saved)


def test_two_collections_are_loaded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two collections have tables with the same names."""
    source, target = (torch.nn.ModuleList([make(), make()]) for _ in range(2))
    for number, each in enumerate(source):
        train(each, range(4 * number, 4 * number + 4))
    save(source, tmp_path)
    for each in target:
        train(each, range(50, 52))
    before = [state_of(each) for each in target]
    with monkeypatch.context() as patch:
        patch.setattr(save_reader, "open_file", FailingOpen(6, OSError("planted")))
        with pytest.raises(OSError, match="planted"):
            loaded(tmp_path, target)
    for each, was in zip(target, before, strict=True):
        assert_same(state_of(each), was)
    loaded(tmp_path, target)
    for each, its in zip(target, source, strict=True):
        assert_same(state_of(each), state_of(its))


# ---- not enough memory for both the previous rows and the loaded rows


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits the reported memory to a few rows."""
    monkeypatch.setattr(capacity, "available_memory", lambda: 100)


def large() -> Any:
    """Builds a model with more rows than the save; freeing these rows frees enough memory for the load."""
    target = before_a_load()
    target.view("a").write(torch.arange(100, 300), {"weight": torch.ones(200, 4)})
    return target


@pytest.mark.parametrize("number", [2, 6])
def test_tables_are_emptied_first_where_memory_is_short(
    number: int, saves: tuple[Path, Any], little_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, saved = saves
    target = large()
    optimizer = state_of(target)["optimizer 0"]
    with monkeypatch.context() as patch:
        patch.setattr(save_reader, "open_file", FailingOpen(number, OSError("planted")))
        with (
            pytest.warns(UserWarning, match=r"host memory cannot hold .* emptied first"),
            pytest.raises(OSError, match="planted"),
        ):
            loaded(path, target)
    state = state_of(target)
    assert not any(state[name] for name in ("a", "a.window", "b.window", "counts"))
    assert state["candidates"][0] == []
    assert_same(state["optimizer 0"], optimizer)
    train(target, range(53, 54))
    with pytest.warns(UserWarning, match="emptied first"):
        assert_same(state_of(loaded(path, large())), saved)


def test_rows_that_never_fit_are_refused(saves: tuple[Path, Any], little_memory: None) -> None:
    target = make()
    before = state_of(target)
    with pytest.raises(MemoryError, match=r"its rows need [0-9]+ bytes of host memory, 100 are free"):
        loaded(saves[0], target)
    assert_same(state_of(target), before)


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Limits the size of files, which emulates a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, ignored)


@pytest.fixture
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder for host stores on disk."""
    return tmp_path_factory.mktemp("stores")


def test_a_full_disk_leaves_the_model_unchanged(
    saves: tuple[Path, Any], stores: Path, request: pytest.FixtureRequest
) -> None:
    target = before_a_load(host_store=stores / "rows")
    files, before = sorted(stores.rglob("*.rows")), state_of(target)
    request.getfixturevalue("small_disk")
    with pytest.raises(OSError, match="host store needs"):
        loaded(saves[0], target)
    assert_same(state_of(target), before)
    assert sorted(stores.rglob("*.rows")) == files
    train(target, range(53, 54))


def test_a_disk_with_space_for_one_copy_only(
    saves: tuple[Path, Any], stores: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows on disk need no memory, but the disk has space for only one copy."""
    monkeypatch.setattr(capacity, "available_memory", lambda: 0)
    path, saved = saves
    target = before_a_load(host_store=stores / "rows")
    assert_same(state_of(loaded(path, target)), saved)
    assert len(list(stores.rglob("*.rows"))) == 2, "files of the previous rows are gone"
    monkeypatch.setattr(capacity, "_free_bytes", lambda store: 100)
    with pytest.warns(UserWarning, match="the disk of host_store .* emptied first"):
        assert_same(state_of(loaded(path, target)), saved)
    fresh = make(host_store=stores / "more")
    monkeypatch.setattr(capacity, "_free_bytes", lambda store: -(1 << 40))
    with pytest.raises(OSError, match=r"its rows need .* of the disk of host_store .*more', -1099511627776 are free"):
        loaded(path, fresh)


# ---- replacing the previous rows


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", [1, 2])
def test_an_interrupt_between_two_groups_is_completed(
    number: int, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next call completes the load for all groups."""
    configs = [rst.TableConfig("a", 30, 4), rst.TableConfig("b", 12, 8, hashed=False)]
    source, target = (embedding_of(*configs, cache=12) for _ in range(2))
    train(source, range(4))
    save(source, tmp_path)
    train(target, range(50, 52))
    replace_engine, calls = Group.replace_engine, []

    def interrupted(group: Group, *arguments: Any) -> None:
        calls.append(group)
        if when == "after":
            replace_engine(group, *arguments)
        if len(calls) == number:
            raise KeyboardInterrupt
        if when == "before":
            replace_engine(group, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Group, "replace_engine", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loaded(tmp_path, target)
    assert_same(target, source)
    for each in (source, target):
        train(each, range(4, 6))
    assert_same(target, source)


def test_cache_counters_continue_after_a_load(saves: tuple[Path, Any]) -> None:
    target = before_a_load()
    before = [target.cache_stats(table) for table in (None, "a", "b")]
    loaded(saves[0], target)
    assert len(target.view("a").take_evicted()) == target.cache_stats("a")["evicted_waiting"] + 3
    for table, counted in zip((None, "a", "b"), before, strict=True):
        now = target.cache_stats(table)
        assert now["warmed_rows"] > 0
        counted["warmed_rows"] = now["warmed_rows"]
        assert {name: now[name] for name in counted} == counted | {"pinned_rows": 0, "evicted_waiting": 0}
    train(target, range(53, 54))
    assert target.cache_stats("a")["batches"] == before[1]["batches"] + 1
    target.reset_cache_stats()
    assert not any(target.cache_stats().values())


def test_changes_are_tracked_from_the_load_on(saves: tuple[Path, Any]) -> None:
    target = before_a_load()
    view = target.view("a")
    versions = [view.version()]
    loaded(saves[0], target)
    versions.append(view.version())
    changed = [[int(i) for chunk in view.chunks(since=version) for i in chunk.ids] for version in versions]
    assert sorted(changed[0]) == sorted(view.ids().tolist())
    assert changed[1] == []
    view.write(view.ids()[:1], {"weight": torch.ones(1, 4)})
    assert [int(i) for chunk in view.chunks(since=versions[1]) for i in chunk.ids] == view.ids()[:1].tolist()


def test_prefetched_batches_are_replanned_after_a_load(saves: tuple[Path, Any]) -> None:
    """The look-ahead policy has been given the batches before the load."""
    target, twin = (make(cache_policy="look_ahead") for _ in range(2))
    ids = torch.tensor([1, 2, 3, 4, 5, 1, 2, 3, 4, 5])
    batches = [(ids + i, torch.arange(0, 11, 5)) for i in range(6)]
    seen = {"clicks": torch.ones(10, dtype=torch.int64), "timestamps": torch.full((10,), 60)}
    for each in (target, twin):
        train(each, range(50, 51))
        if each is target:
            for batch in batches:
                each.prefetch(*batch, **seen)
            each.queue.wait()
        loaded(saves[0], each)
        for batch in batches:
            each(*batch, **seen).square().sum().backward()
    assert_same(state_of(target), state_of(twin))
