"""After a load the device cache has the hot rows: the next steps have no more misses than without a restart."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from embeddings import embedding_of
from tables import ADAGRAD, WINDOWS, assert_same, delta, loaded, make, save, train, written
from tables import trained as trained_tables

from rec_sdk_torch import _engine
from rec_sdk_torch.rules import Rows, Score, Share
from rec_sdk_torch.saves.format.manifest import CACHED
from rec_sdk_torch.serving import TableReader
from rec_sdk_torch.tbe import Pooling, TableBatchedEmbedding, TableConfig
from rec_sdk_torch.tbe.cache.device_cache import Group
from rec_sdk_torch.tbe.config.lifecycle import TableLifecycle

ROWS, SLOTS, BATCH = 4000, 400, 32
MARGIN = 1.03
"""The largest ratio of misses after a load to misses of the saved model on the same batches."""


def skewed(
    cache: int = SLOTS, policy: str = "lrfu", device: Any = "cpu", rows: int = ROWS, **options: Any
) -> TableBatchedEmbedding:
    """Builds a table with a small cache."""
    table = TableConfig("t", rows, 4, pooling=Pooling.SUM, **options)
    return embedding_of(table, cache=cache, cache_policy=policy, device=device)


def power_law(seed: int) -> Iterator[torch.Tensor]:
    """Yields batches of ids with power-law frequencies that are unrelated to the ids' order."""
    weights = 1 / np.arange(1, ROWS + 1) ** 1.05
    places, rng = np.random.default_rng(0).permutation(ROWS), np.random.default_rng(seed)
    while True:
        yield torch.from_numpy(places[rng.choice(ROWS, BATCH, p=weights / weights.sum())])


def misses(embedding: TableBatchedEmbedding, batches: Iterator[torch.Tensor], steps: int) -> int:
    """Returns the number of misses in the next batches."""
    before = embedding.cache_stats()["unique_misses"]
    for _ in range(steps):
        ids = next(batches).to(embedding.device)
        embedding(ids, torch.arange(len(ids) + 1).to(embedding.device)).sum().backward()
    return embedding.cache_stats()["unique_misses"] - before


def misses_of(embedding: TableBatchedEmbedding, ids: range) -> int:
    return misses(embedding, iter([torch.tensor(ids)]), 1)


def trained(steps: int, **options: Any) -> TableBatchedEmbedding:
    embedding = skewed(**options)
    misses(embedding, power_law(1), steps)
    return embedding


def ids_in_cache(embedding: TableBatchedEmbedding, table: str = "t") -> list[int]:
    """Returns the cached ids, the hottest first."""
    with embedding.exclusive():
        ids, _ = embedding.view(table).cached().by_heat()
    return [int(i) for i in ids]


@pytest.mark.parametrize(
    ("policy", "hashed"), [("lrfu", False), *((policy, True) for policy in _engine.cache_policies())]
)
def test_first_steps_have_no_more_misses_than_later_ones(
    policy: str, hashed: bool, tmp_path: Path, device: Any
) -> None:
    options = {"policy": policy, "device": device, "hashed": hashed}
    source = trained(600, **options)
    save(source, tmp_path)
    warmed, cold = (loaded(tmp_path, skewed(**options), warm=warm) for warm in (True, False))
    assert (warmed.cache_stats()["warmed_rows"], cold.cache_stats()["warmed_rows"]) == (SLOTS, 0)
    assert warmed.cache_stats()["rows_in"] == 0
    of = {id(each): power_law(2) for each in (source, warmed, cold)}
    for steps in (10, 90, 100):
        goes_on, after_load = (misses(each, of[id(each)], steps) for each in (source, warmed))
        assert after_load <= MARGIN * goes_on
        if steps == 10:  # under any policy: later the cold cache has filled
            assert misses(cold, of[id(cold)], steps) > 1.4 * goes_on, "a cold cache is seen"


@pytest.mark.parametrize("policy", _engine.cache_policies())
def test_a_cache_of_another_size_has_the_hottest_rows(policy: str, tmp_path: Path) -> None:
    source = trained(50, policy=policy)
    hot = ids_in_cache(source)
    save(source, tmp_path)
    others = [(other, SLOTS // 3) for other in _engine.cache_policies() if other != policy]
    for other, slots in [*((policy, slots) for slots in (SLOTS // 3, SLOTS, 2 * SLOTS, ROWS)), *others]:
        target = loaded(tmp_path, skewed(slots, other))
        assert set(ids_in_cache(target)) == set(hot[:slots])
        if slots < SLOTS:
            kept = hot[: slots - BATCH]
            target(torch.arange(10**6, 10**6 + BATCH), torch.arange(BATCH + 1)).sum().backward()
            assert set(kept) <= set(ids_in_cache(target)), "the coldest leave first"


def test_lfu_counts_continue_after_a_load(tmp_path: Path) -> None:
    source = trained(100, policy="lfu")
    save(source, tmp_path)
    heats = []
    for each in (source, loaded(tmp_path, skewed(policy="lfu"))):
        with each.exclusive():
            cached = each.view("t").cached()
        heats.append(dict(zip(cached.ids, cached.heats, strict=True)))
    assert heats[0] == heats[1]
    assert max(heats[0].values()) > 8


@pytest.mark.parametrize("optimizer", [ADAGRAD, WINDOWS], ids=["", "within a window"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_results_are_the_same_bits(optimizer: Any, on_disk: bool, tmp_path: Path, device: Any) -> None:
    """Tables are in several groups: float32, bfloat16, and bfloat16 in the cache only."""
    source = trained_tables(5, optimizer, device=device)
    save(source, tmp_path / "saves")
    stores = [{"host_store": str(tmp_path / name)} if on_disk else {} for name in "ab"]
    targets = [make(optimizer, cache=17, device=device, **store) for store in stores]
    for warm, target in zip((True, False), targets, strict=True):
        train(target, range(70, 72))
        assert_same(loaded(tmp_path / "saves", target, warm=warm), source)
    assert targets[0].cache_stats("b")["warmed_rows"] > 0
    for a, b in zip(*(train(target, range(5, 14)) for target in targets), strict=True):
        assert torch.equal(a, b)
    assert_same(*targets)


def test_the_latest_list_of_cached_rows_is_used(tmp_path: Path) -> None:
    """A delta lists all of them, with 10 bytes per row."""
    source = trained(20, track_changes=True)
    delta(source, tmp_path)
    misses(source, power_law(2), 80)
    (listed,) = [file for file in written(source, tmp_path).files if file.role == CACHED]
    assert listed.rows == SLOTS
    assert listed.bytes < 10 * SLOTS + 400
    assert set(ids_in_cache(loaded(tmp_path, skewed(track_changes=True)))) == set(ids_in_cache(source))


def test_an_index_table_of_fewer_rows(tmp_path: Path) -> None:
    source, target = trained(50, hashed=False), skewed(rows=ROWS // 2, hashed=False)
    save(source, tmp_path)
    with pytest.warns(UserWarning, match="num_embeddings"):
        loaded(tmp_path, target)
    assert set(ids_in_cache(target)) == {i for i in ids_in_cache(source) if i < ROWS // 2}


def save_without_the_list(source: TableBatchedEmbedding, path: Path) -> None:
    with mock.patch("rec_sdk_torch.tbe.rows.snapshot.Snapshot.cached", return_value=None):
        save(source, path)


def test_a_save_without_a_list_of_cached_rows(tmp_path: Path) -> None:
    """Counters of a table's rules show which rows were hot; without counters the cache is empty."""
    counts = {"score": TableLifecycle(eviction=Share(0.1)), "count": TableLifecycle(bound=Rows(10**6)), None: None}
    for column, lifecycle in counts.items():
        folder = tmp_path / str(column)
        source = trained(50, lifecycle=lifecycle)
        save_without_the_list(source, folder)
        target = loaded(folder, skewed(100, lifecycle=lifecycle))
        assert target.cache_stats()["warmed_rows"] == (0 if column is None else 100)
        if column is not None:
            view = source.view("t")
            least = view.row_columns(view.ids())[column].sort(descending=True).values[99]
            assert (view.row_columns(torch.tensor(ids_in_cache(target)))[column] >= least).all()


def test_a_save_without_a_list_uses_decayed_scores(tmp_path: Path) -> None:
    """A score dates from the last batch with the row, so scores are compared after decay."""
    lifecycle = TableLifecycle(bound=Rows(10**6), score=Score(half_life=3))
    source = trained(50, lifecycle=lifecycle)
    save_without_the_list(source, tmp_path)
    columns = source.view("t").row_columns(source.view("t").ids())
    left = columns["score"] * 0.5 ** ((50 - columns["last_use"]) / 3)
    target = loaded(tmp_path, skewed(100, lifecycle=lifecycle))
    warmed = torch.isin(source.view("t").ids(), torch.tensor(ids_in_cache(target)))
    assert warmed.sum() == 100
    assert left[warmed].min() >= left[~warmed].max() * (1 - 1e-12)


def test_a_load_without_device_memory_is_complete(tmp_path: Path) -> None:
    """The rows are loaded; a warning states that they are not in the cache."""
    source, target = trained(20), skewed()
    save(source, tmp_path)
    with (
        mock.patch.object(Group, "scatter", side_effect=RuntimeError("planted")),
        pytest.warns(UserWarning, match="'t' is loaded, but its hot rows could not be copied to the cache: planted"),
    ):
        loaded(tmp_path, target)
    assert_same(target, source)
    assert ids_in_cache(target) == []
    assert misses(target, power_law(1), 20) > 0


# ---- ids given by the caller


def test_warming_with_given_ids(device: Any) -> None:
    embedding = skewed(40, device=device, hashed=True)
    view = embedding.view("t")
    view.write(torch.arange(100), {"weight": torch.ones(100, 4)})
    assert view.warm(torch.tensor([7, 10**9, 3, 7])) == 2, "an id that is not known, and one that is there twice"
    assert ids_in_cache(embedding) == [7, 3]
    assert view.warm(torch.arange(100)) == 38
    assert view.warm(torch.arange(100)) == 0, "the cache is full"
    assert misses_of(embedding, range(40)) == 0
    assert embedding.cache_stats()["warmed_rows"] == 40
    assert misses_of(embedding, range(60, 90)) == 30
    assert view.warm(torch.arange(10), torch.arange(10.0)) == 0
    for wrong in (torch.ones(9), torch.full((10,), -1.0), torch.full((10,), float("nan"))):
        with pytest.raises(ValueError, match="heats"):
            view.warm(torch.arange(10), wrong)
    with pytest.raises(TypeError, match="expected flat"):
        view.warm(torch.ones(3))


def test_warming_unused_rows_of_an_index_table() -> None:
    embedding, other = skewed(40, hashed=False), skewed(40, hashed=False)
    assert embedding.view("t").warm(torch.tensor([5, 6, 5])) == 2
    with pytest.raises(IndexError):
        embedding.view("t").warm(torch.tensor([ROWS]))
    some, offsets = torch.tensor([6, 9]), torch.tensor([0, 1, 2])
    assert torch.equal(embedding(some, offsets), other(some, offsets))
    assert embedding.cache_stats()["unique_misses"] == 1


def test_warming_beside_batches_in_flight_is_refused() -> None:
    embedding = skewed(60)
    embedding.view("t").write(torch.arange(100), {"weight": torch.ones(100, 4)})
    some, offsets = torch.arange(20), torch.arange(21)
    output = embedding(some, offsets)
    with pytest.raises(RuntimeError, match="in flight"):
        embedding.view("t").warm(torch.arange(100))
    output.sum().backward()
    coming = torch.arange(10, 50)
    embedding.prefetch(coming, torch.arange(41))
    embedding.queue.wait()
    assert embedding.view("t").warm(torch.arange(100)) == 40, "the plan that was made ahead is made anew"
    assert misses_of(embedding, range(10, 50)) == 0


def test_frozen_tables_are_read_from_the_cache() -> None:
    embedding = skewed(100)
    embedding.view("t").write(torch.arange(300), {"weight": torch.ones(300, 4)})
    embedding.freeze()
    assert embedding.view("t").warm(torch.arange(100)) == 100
    (group,) = embedding.groups
    keys, some = np.zeros(1, np.int64), np.arange(50)
    plan = group.engine.find(some, np.array([0, 50]), keys, 1, 0, 1)
    assert plan.all_resident
    some, offsets = torch.arange(250, 255), torch.tensor([0, 5])
    assert torch.equal(embedding(some, offsets), torch.full((1, 4), 5.0))
    assert embedding.cache_stats()["unique_misses"] == 0


# ---- another dtype in the cache


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("hashed", [True, False])
def test_a_load_that_rounds_is_followed_by_a_full_save(tmp_path: Path, hashed: bool, warm: bool) -> None:
    """A delta would omit rows that no batch has used since the load, which a reader would then see unrounded."""
    options: dict[str, Any] = {"hashed": hashed, "track_changes": True}
    narrow = options | {"cache_dtype": torch.bfloat16}
    save(trained(20, **options), tmp_path)
    with pytest.warns(UserWarning, match=r"tables \['t'\]: weights of the save are rounded to the .*cache_dtype"):
        target = loaded(tmp_path, skewed(**narrow), warm=warm)
    check_reader(target, tmp_path, expected=False)
    misses(target, power_law(2), 3)
    for kind in ("full", "delta"):  # contents of a save of the narrow table are exact in the next one
        assert written(target, tmp_path).kind == kind
        check_reader(target, tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            target = loaded(tmp_path, skewed(**narrow), warm=warm)
        check_reader(target, tmp_path)
        misses(target, power_law(3), 3)


def check_reader(embedding: TableBatchedEmbedding, path: Path, *, expected: bool = True) -> None:
    """Checks whether a reader of the latest save has the rows of the table, as `expected`."""
    reader = TableReader(path, "t")
    ids = embedding.view("t").ids()
    weights, found = reader.find(ids)
    assert found.all() or not embedding.tables[0].hashed
    live = embedding.view("t").read(ids).parts["weight"]
    assert torch.equal(weights[found], live[found]) is expected


def test_a_wider_cache_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    options: dict[str, Any] = {"hashed": True, "track_changes": True, "weight_dtype": torch.bfloat16}
    save(trained(20, **options), tmp_path)
    target = loaded(tmp_path, skewed(cache_dtype=torch.float32, **options))
    check_reader(target, tmp_path)
    misses(target, power_law(2), 3)
    assert written(target, tmp_path).kind == "delta"
