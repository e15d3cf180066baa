"""The engine's deduplication of ids, compared with a reference that uses Python dictionaries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference_homes import home_of
from threads import threads

from rec_sdk_torch._engine import Deduplicator, UniqueBatch
from rec_sdk_torch.operators.segments import hot_segments

SEGMENT_TYPES = np.int32, np.int32, np.int32, np.float32, np.int32, np.int32


def fields(arena: np.ndarray, places: Any, *dtypes: Any) -> list[Any]:
    found = []
    for place, dtype in zip(places, dtypes, strict=True):
        found.append(None if place is None else arena[place[0] : place[0] + place[1]].view(dtype).tolist())
    return found


class Case:
    """Random tables and a batch; features share keys, and a key may be unused."""

    def __init__(self, rng: np.random.Generator, longest: int = 4) -> None:
        tables = int(rng.integers(1, 5))
        self.world_size = int(rng.integers(1, 6))
        self.rows = [int(rng.choice([0, 7])) for _ in range(tables)]
        ranks = [int(rng.integers(-3, self.world_size)) for _ in range(tables)]
        self.homes = [(rank, int(rng.integers(1, 4)) if rank == -3 else 0) for rank in ranks]
        self.groups = [int(rng.integers(0, table + 1)) if table else 0 for table in range(tables)]
        used = sorted(set(self.groups))
        self.groups = [used.index(group) for group in self.groups]
        self.tables = sorted([*range(tables), *rng.integers(0, tables, 2).tolist()])
        self.pooled, self.weighted = bool(rng.integers(2)), bool(rng.integers(2))
        self.columns = [4 * f for f in range(len(self.tables))] if self.pooled else []
        self.means = rng.integers(0, 2, len(self.tables)).astype(bool).tolist() if self.pooled else []
        self.size = int(rng.integers(0, 5))
        keys = int(rng.integers(1, 5))
        self.keys = rng.integers(0, keys, len(self.tables))
        lengths = rng.integers(0, longest + 1, keys * self.size)
        dtype = rng.choice([np.int32, np.int64])
        self.offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(dtype)
        self.values = rng.integers(-9, 10, self.offsets[-1]).astype(dtype)

    def run(self, segments: bool = True) -> UniqueBatch:
        host = Deduplicator(self.rows, self.homes, self.groups, self.tables, self.columns, self.means, self.world_size)
        # an empty batch must not affect the next one
        host.run(self.values[:0], np.zeros(1, np.int64), np.zeros_like(self.keys), 0)
        return host.run(self.values, self.offsets, self.keys, self.size, self.weighted, segments)

    def lookups(self, table: int) -> list[tuple[int, int, int, int]]:
        """Lists (id, feature, bag of the feature, position in values) of each lookup of a table."""
        found = []
        for feature, of in enumerate(self.tables):
            if of != table:
                continue
            for bag in range(self.size):
                first = int(self.keys[feature]) * self.size + bag
                for place in range(int(self.offsets[first]), int(self.offsets[first + 1])):
                    i = int(self.values[place])
                    wrong = self.rows[table] and not 0 <= i < self.rows[table]
                    found.append((0 if wrong else i, feature, bag, place))
        return found


def check(case: Case, found: UniqueBatch) -> None:
    count = len(case.homes)
    of_table = [case.lookups(table) for table in range(count)]
    places: dict[tuple[int, int], int] = {}  # (table, id) -> slot number
    ids, repeats = [], []
    slots = [0] * (max(case.groups) + 1)
    for rank in range(case.world_size):
        for table in range(count):
            here = [i for i, *_ in of_table[table] if home_of(i, case.homes[table], case.world_size) == rank]
            assert found.lookups[rank, table] == len(here)
            assert found.counts[rank, table] == len(set(here))
            for i in dict.fromkeys(here):
                ids.append(i)
                repeats.append(here.count(i))
                places[table, i] = slots[case.groups[table]]
                slots[case.groups[table]] += 1
    assert found.ids.tolist() == ids
    assert found.repeats.tolist() == repeats
    for group, rows in enumerate(slots):
        tables = [table for table in range(count) if case.groups[table] == group]
        lookups = [(table, *lookup) for table in tables for lookup in of_table[table]]
        assert found.rows(group) == rows
        own, offsets, source = fields(*found.slots(group), np.int32, np.int64, np.int64)
        assert own == [places[table, i] for table, i, *_ in lookups]
        whole = list(range(len(case.values)))
        assert [place for *_, place in lookups] == (whole if source is None else source)
        features = [feature for feature, table in enumerate(case.tables) if table in tables]
        in_bag = [
            [sum(f == feature and b == bag for _, _, f, b, _ in lookups) for bag in range(case.size)]
            for feature in features
        ]
        assert found.feature_lookups(group) == [sum(bags) for bags in in_bag]
        assert offsets == (np.cumsum([0, *(n for bags in in_bag for n in bags)]).tolist() if case.pooled else None)
        borders, row, column, scale, positions, hot = fields(*found.segments(group), *SEGMENT_TYPES)
        order = sorted(range(len(lookups)), key=lambda n: own[n])  # a stable sort
        assert borders == [sum(slot < row for slot in own) for row in range(rows + 1)]
        assert (hot or []) == hot_segments(np.array(borders)).ravel().tolist()
        if not case.pooled:
            assert (row, column, scale, positions) == (order, None, None, None)
            continue
        assert row == [lookups[n][3] for n in order]
        assert column == [case.columns[lookups[n][2]] for n in order]
        assert positions == (order if case.weighted else None)
        mean = [case.means[feature] for feature in features]
        lengths = [in_bag[features.index(f)][bag] for _, _, f, bag, _ in lookups]
        expected = [np.float32(1) / np.float32(lengths[n]) if case.means[lookups[n][2]] else 1 for n in order]
        assert scale == (expected if any(mean) else None)


@pytest.mark.parametrize("seed", range(12))
def test_signals_are_sent_with_their_ids(seed: int) -> None:
    """Two ranks send ids with signals to rank 0, which owns all ids; every table is a hash table."""
    rng = np.random.default_rng([seed, 5])
    kinds = rng.integers(0, 8, 3).tolist()
    tables = [0, 1, 1, 2, 2]
    host = Deduplicator([0] * 3, [(0, 0)] * 3, [0] * 3, tables, [], [], 2, kinds)
    wide = [bool(kind & 4) and tables.count(t) > 1 for t, kind in enumerate(kinds)]
    words = [(k & 1) + bool(k & 2) + 2 * bool(k & 4) + more for k, more in zip(kinds, wide, strict=True)]
    assert host.signal_words.tolist() == words
    seen: dict[tuple[int, int], list[tuple[int, int, int, int, int]]] = {}  # (table, id) -> (feature, rank, ...)
    found = []
    for rank in (0, 1):
        size = int(rng.integers(0, 3))
        offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 5, 5 * size))])
        ids, labels, stamps = (rng.integers(low, 9, offsets[-1]) for low in (-3, -1, -9))
        labels = labels.astype(np.int32)
        found.append(host.run(ids, offsets, np.arange(5), size, False, False, True, labels, stamps))
        for feature, table in enumerate(tables):
            for place in range(int(offsets[feature * size]), int(offsets[(feature + 1) * size])):
                sight = feature, rank, place, max(0, int(labels[place])), int(stamps[place])
                seen.setdefault((table, int(ids[place])), []).append(sight)
        latest = [
            max((s[4] for (t, _), of in seen.items() for s in of if t == table and s[1] == rank), default=-(2**63))
            for table in range(3)
        ]
        dated = [t for t in range(3) if kinds[t] & 4]
        assert found[-1].latest[dated].tolist() == [latest[t] for t in dated]
        without = host.run(ids, offsets, np.arange(5), size)
        assert len(without.signals) == 0, "nobody asked"
        assert without.ids.tolist() == found[-1].ids.tolist()
    counts = np.stack([each.counts[0] for each in found])
    ids = np.concatenate([each.ids for each in found])
    numbers = np.concatenate([each.signals for each in found])
    assert len(numbers) == int((counts * words).sum())
    got = host.received_signals(counts, ids, numbers)
    assert [one is None for one in got] == [not any(kind & bit for kind in kinds) for bit in (1, 2, 4)]
    shows, clicks, stamps = (np.zeros(len(ids), int) if one is None else one for one in got)
    owners = [(rank, table) for rank in (0, 1) for table in range(3) for _ in range(counts[rank, table])]
    for place, (rank, table) in enumerate(owners):
        sights = seen[table, int(ids[place])]
        own = [sight for sight in sights if sight[1] == rank]
        if kinds[table] & 1:
            assert shows[place] == len(own)
        if kinds[table] & 2:
            assert clicks[place] == sum(sight[3] for sight in own)
        if wide[table]:
            assert stamps[place] == max(sights)[4], "the last of all ranks, by feature, then rank"
        elif kinds[table] & 4:
            assert stamps[place] == max(own)[4]
    if ids.size:
        with pytest.raises(ValueError, match="the counts require"):
            host.received_signals(counts + 1, ids, numbers)


def dedup(**change: Any) -> Deduplicator:
    """Builds a deduplicator for one hash table with one feature; two ranks own its ids by modulo."""
    options: dict[str, Any] = {"num_embeddings": [0], "homes": [(-1, 0)], "groups": [0], "feature_tables": [0]}
    return Deduplicator(**{**options, "feature_columns": [], "feature_means": [], "world_size": 2} | change)


def test_invalid_signals_are_refused() -> None:
    host = dedup(world_size=1, signals=[6])
    batch = np.zeros(2, np.int64), np.array([0, 2]), np.zeros(1, np.int64), 1
    with pytest.raises(ValueError, match="a table requires clicks, and the batch has none"):
        host.run(*batch, signals=True)
    with pytest.raises(ValueError, match="timestamps must have one entry per id, 2, got 3"):
        host.run(*batch, signals=True, clicks=np.zeros(2, np.int32), timestamps=np.zeros(3, np.int64))
    with pytest.raises(ValueError, match=r"counts must have shape \[1, 1\]"):
        host.received_signals(np.zeros((2, 1), np.int64), np.zeros(0, np.int64), np.zeros(0, np.int32))


@pytest.mark.parametrize("seed", range(8))
def test_random_batches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(30):
        case = Case(rng)
        check(case, case.run())
        check(case, case.run(segments=False))


def test_ids_out_of_range_of_an_index_table() -> None:
    host = Deduplicator([5, 0], [(-1, 0)] * 2, [0, 0], [0, 1], [], [], 2)
    found = host.run(np.array([4, 5, -1, 9, -9]), np.array([0, 3, 5]), np.array([0, 1]), 1)
    assert found.out_of_range == [(0, 2, 5)]
    assert found.ids.tolist() == [4, 0, 9, -9]  # sent to rank 0: 4 and 0; sent to rank 1: 9 and -9


def test_a_large_batch_on_any_number_of_threads() -> None:
    rng = np.random.default_rng(0)
    values = rng.zipf(1.3, 60_000) % 5_000 - 100
    offsets = np.arange(0, 60_001, 5)
    seen = []
    for count in (1, 3):
        host = Deduplicator(
            [0] * 3, [(-1, 0), (2, 0), (-2, 0)], [0, 1, 0], [0, 1, 2], [0, 4, 8], [True, False, False], 4
        )
        with threads(count):
            found = host.run(values, offsets, np.arange(3), 4_000, True)
        arrays = [array.tolist() for array in (found.ids, found.repeats, found.counts)]
        for group in (0, 1):
            arrays += fields(*found.slots(group), np.int32, np.int64, np.int64)
            borders, *others, hot = fields(*found.segments(group), *SEGMENT_TYPES)
            assert hot == hot_segments(np.array(borders)).ravel().tolist()
            assert len(hot) > 40
            arrays += [borders, *others, hot]
        seen.append(arrays)
    assert seen[0] == seen[1]
    assert len(seen[0][0]) == sum(len(set(part.tolist())) for part in np.split(values, 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"homes": [(2, 0)]}, "table 0: rank 2 of 2 is not valid"),
        ({"homes": [(-4, 0)]}, "table 0: rank -4 of 2 is not valid"),
        ({"homes": [(-3, 0)]}, "table 0: a block of 0 ids is not valid with rank -3"),
        ({"homes": [(-1, 5)]}, "table 0: a block of 5 ids is not valid with rank -1"),
        ({"groups": [-1]}, "table 0: group -1 or 0 rows"),
        ({"groups": [0, 0]}, "one entry per table, 1"),
        ({"feature_tables": [1]}, "features must be ordered by table"),
        ({"feature_columns": [0, 4]}, "one entry per feature, 1"),
        ({"world_size": 0}, "world_size must be at least 1"),
        ({"signals": [1, 2]}, "signals must have one entry per table, 1"),
    ],
)
def test_invalid_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dedup(**change)


def test_invalid_offsets_are_refused() -> None:
    host = dedup()
    with pytest.raises(ValueError, match="offsets must end at the number of ids, 2, got 3"):
        host.run(np.array([1, 2]), np.array([0, 3]), np.array([0]), 1)
    assert host.run(np.array([1, 1]), np.array([0, 2]), np.array([0]), 1).ids.tolist() == [1]
