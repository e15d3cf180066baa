"""Admission and eviction in sharded tables: every rank's local shard matches the plain Python reference.

Sketches are saved and loaded by the same or another number of ranks, and by one process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sketch_reference
import torch
from coin_reference import Coin
from collection_factory import apply, bag_config, bags_collection, sequence_config
from lifecycle_reference import LifecycleReference
from ranks import Place, Start, on_ranks
from sharded_model import Model, Scenario, shard
from torchrec import KeyedJaggedTensor

import rec_sdk_torch as rst
from rec_sdk_torch.rules import Age, Bytes, Rows, Sketch
from rec_sdk_torch.saves.owners import table_owners
from rec_sdk_torch.tbe import Home

SHOW_CLICK = rst.AdmitAndEvictPolicyType.POLICY_SHOWCLICK
STEPS, SEED = 9, 3
RULES: dict[str, dict[str, Any]] = {
    "age": {"evict_threshold": 9, "evict_step_interval": 2},
    "age_of_candidates": {"evict_threshold": 15, "admit_threshold": 3, "evict_step_interval": 1},
    "clicks": {"policy_type": SHOW_CLICK, "showclick_params": rst.ShowClickParams(0.5, 1, 3.5)},
    "share": {
        "policy_type": SHOW_CLICK,
        "showclick_params": rst.ShowClickParams(1, 0.75, 2, 0.3, 0.5),
        "evict_step_interval": 3,
    },
    "rows": {"max_rows": 13, "admit_threshold": 2},
    "bytes": {"max_bytes": 20 * 16},
    "chance": {"admit_probability": 0.2, "max_rows": 30},
    "half_life": {
        "policy_type": SHOW_CLICK,
        "showclick_params": rst.ShowClickParams(1, 0.75, 0, 0.3),
        "score_half_life": 2,
        "evict_step_interval": 3,
    },
    "sketch": {"admit_threshold": 4, "sketch_bytes": 400, "sketch_halve_after": 40},
}


ON_FOUR = ("age_of_candidates", "rows", "sketch")


@dataclass
class Batch:
    """A data loader's batch with click labels, in an attribute that the pipeline reads."""

    features: KeyedJaggedTensor
    click_labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(self.features.to(device, non_blocking), self.click_labels.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: Any) -> None:
        self.features.record_stream(stream)


def batch_of(step: int, rank: int, kind: str) -> Batch:
    rng = np.random.default_rng([step, rank, sorted(RULES).index(kind)])
    samples = int(rng.integers(0, 4))
    lengths = rng.integers(0, 5, 2 * samples)
    ids = rng.integers(-15, 16, lengths.sum())
    stamps = torch.from_numpy(5 * step + rng.integers(0, 12, len(ids)))
    if len(ids) > 3:  # most timestamps of a rank are right
        stamps[int(rng.integers(0, len(ids)))] += 10**12 * int(rng.integers(0, 2))
    features = rst.KeyedJaggedTensorWithTimestamp(
        ["f0", "f1"], torch.from_numpy(ids), stamps, lengths=torch.from_numpy(lengths).int()
    )
    return Batch(features, torch.from_numpy(rng.integers(-1, 3, samples)))


class Lookups(torch.nn.Module):
    def __init__(self, rules: dict[str, Any]) -> None:
        super().__init__()
        config = sequence_config("t0", ["f0", "f1"], admit_and_evict_config=rst.AdmitAndEvictConfig(**rules))
        self.sparse = rst.EmbCacheEmbeddingCollection([config], cache=80, device=Place.device, seed=SEED)
        self.scale = torch.nn.Parameter(torch.ones(1, device=Place.device))
        rst.apply_optimizer_in_backward(torch.optim.SGD, self.sparse.parameters(), {"lr": 0.1})

    def forward(self, batch: Batch) -> tuple[torch.Tensor, None]:
        output = self.sparse(batch.features)
        return torch.cat([output[name].values() for name in ("f0", "f1")]).sum() * self.scale, None


def sharded_model(rules: dict[str, Any], sharding: str = "row_wise") -> Any:
    return shard(Lookups(rules), Scenario(sharding=(sharding,)))


def table_state(view: Any) -> dict[str, Any]:
    """Returns the ids, candidates, counters, clocks and sketch of a table."""
    ids = view.ids()
    order = ids.argsort()
    columns = {name: values[order].tolist() for name, values in view.row_columns(ids).items()}
    candidates, counted = view.candidates()
    return {
        "ids": ids[order].tolist(),
        "columns": columns,
        "candidates": candidates.tolist(),
        "counted": {name: values.tolist() for name, values in counted.items()},
        "clocks": view.clocks(),
        "sketch": view.sketch().tolist(),
    }


def expected(kind: str, rank: int, world_size: int) -> tuple[list[dict[str, Any]], int]:
    """Computes with the reference the state of the rank's shard after each step, and how many ids a final
    `evict` removes.
    """
    rules = rst.AdmitAndEvictConfig(**RULES[kind]).table_lifecycle()
    assert rules is not None
    bounds = [Rows(bound.numbers(16)[1]["most"] // world_size) for bound in rules.bound]
    admission = rules.admission
    if isinstance(admission, Sketch):
        part = admission.bytes // world_size, admission.depth, admission.halve_after // world_size
        admission = Sketch(admission.threshold, *part)
    lifecycle = LifecycleReference(replace(rules, admission=admission, bound=bounds), coin=Coin(SEED, "t0"))
    seen = []
    names = rules.columns()
    known = {"count": True, "clicks": rules.needs_clicks, "timestamp": rules.rule(Age)}
    counted = [name for name, kept in known.items() if kept]
    for step in range(STEPS):
        lookups = [
            of for feature in (0, 1) for each in range(world_size) for of in lookups_of(step, each, kind, feature)
        ]
        lifecycle.advance_clock([stamp for *_, stamp in lookups])
        own = np.array([of for of in lookups if of[0] % world_size == rank], np.int64).reshape(-1, 3)
        lifecycle.batch(*own.T, seen=True)
        lifecycle.end_step(set())
        rows, candidates = sorted(lifecycle.rows), sorted(lifecycle.candidates)
        clocks = {"batches": lifecycle.batches, "steps": lifecycle.steps}
        if rules.rule(Age):
            clocks["timestamp"] = lifecycle.latest
        seen.append(
            {
                "ids": rows,
                "columns": lifecycle.columns(lifecycle.rows, rows, names),
                "candidates": candidates,
                "counted": lifecycle.columns(lifecycle.candidates, candidates, counted),
                "clocks": clocks,
                "sketch": [] if lifecycle.sketch is None else list(lifecycle.sketch.state()),
            }
        )
    before = lifecycle.evicted
    lifecycle.rules = replace(lifecycle.rules, every=1)
    lifecycle.end_step(set())
    return seen, lifecycle.evicted - before


def lookups_of(step: int, rank: int, kind: str, feature: int) -> list[tuple[int, int, int]]:
    """Returns (id, click, timestamp) of each lookup of a feature."""
    batch = batch_of(step, rank, kind)
    lengths = batch.features.lengths().view(2, -1)
    begin = int(lengths[0].sum()) * feature
    count = int(lengths[feature].sum())
    clicks = batch.click_labels.clamp(min=0).repeat_interleave(lengths[feature])
    ids, stamps = batch.features.values(), batch.features.timestamps
    return list(
        zip(ids[begin : begin + count].tolist(), clicks.tolist(), stamps[begin : begin + count].tolist(), strict=True)
    )


@on_ranks()
@pytest.mark.parametrize(("kind", "world_size"), [*((kind, 2) for kind in RULES), *((kind, 4) for kind in ON_FOUR)])
def test_shards_admit_and_evict_by_the_lookups_of_all_ranks(rank: int, kind: str, world_size: int) -> None:
    model, (steps, leave) = sharded_model(RULES[kind]), expected(kind, rank, world_size)
    sparse, dense = model.module.sparse, torch.optim.SGD([model.module.scale], lr=0.0)
    pipeline: Any = rst.EmbCacheTrainPipelineSparseDist(model, dense, "cpu", Place.device, depth=world_size % 3)
    batches = (batch_of(step, rank, kind) for step in range(STEPS))
    for step, right in enumerate(steps):
        pipeline.progress(batches)
        found = table_state(sparse.local_shard.embedding.view("t0"))
        assert sparse.clocks("t0") == found["clocks"]
        for name, value in right.items():
            actual = {each: found[name][each] for each in value} if isinstance(value, dict) else found[name]
            assert actual == value, f"step {step}: {name}"
    assert sparse.evict("t0") == leave, "evict(table) is about the rank's own ids"


def small_rows(rank: int, world_size: int, explicit: bool) -> tuple[int, int]:
    """Checks that the rank's rows with a small norm are evicted, at a step or by `evict`; returns the numbers of
    small and of large rows.

    """
    model = sharded_model({"evict_norm": 0.4, "evict_step_interval": 0 if explicit else 4})
    sparse = model.module.sparse
    view = sparse.local_shard.embedding.view("t0")
    for step in range(3):
        model(batch_of(step, rank, "age"))[0].backward()
    weights = view.read(view.ids())
    norms = dict(zip(weights.ids.tolist(), weights.parts["weight"].double().norm(dim=1).tolist(), strict=True))
    stays = {i for i, norm in norms.items() if norm >= 0.4}
    if explicit:
        assert sparse.evict("t0") == len(norms) - len(stays)
    else:
        none = KeyedJaggedTensor(["f0", "f1"], torch.tensor([], dtype=torch.int64), lengths=torch.zeros(2).int())
        model(Batch(none, torch.zeros(1, dtype=torch.int64)))[0].backward()
        assert set(view.ids().tolist()) == stays
        assert sparse.cache_stats("t0")["evicted"] == len(norms) - len(stays)
    return len(norms) - len(stays), len(stays)


@pytest.mark.parametrize("explicit", [False, True])
def test_each_shard_evicts_its_rows_by_norm(ranks_of: Start, explicit: bool) -> None:
    assert all(sum(counts) for counts in zip(*ranks_of(2).run(small_rows, explicit), strict=True))


SHOW, STAMP, FEATURE = 4, 8, 4


@on_ranks(2)
@pytest.mark.parametrize(
    ("rules", "each"),
    [
        ({"evict_idle_steps": 3}, 0),
        ({"admit_threshold": 2}, SHOW),
        ({"evict_threshold": 9}, STAMP + FEATURE),
        ({"policy_type": SHOW_CLICK, "showclick_params": rst.ShowClickParams(1, 1, 3)}, SHOW + 4),
    ],
)
def test_only_signals_that_a_rule_needs_are_sent(rank: int, rules: dict[str, Any], each: int) -> None:
    for training, more in ((True, each), (False, 0)):
        model = sharded_model(rules)
        features = rst.KeyedJaggedTensorWithTimestamp(
            ["f0", "f1"],
            torch.tensor([2, 3, 5]),
            torch.tensor([1, 1, 1]),
            lengths=torch.tensor([3, 0]),
            click_labels=torch.tensor([1]),
        )
        model.train(training)
        model(Batch(features, torch.tensor([1])))
        sent = [2, 1][rank] * (8 + more)
        assert model.module.sparse.exchange_stats()["id_bytes"] == sent, "3 and 5 go to rank 1, 2 the other way"


@on_ranks(2)
@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            {"evict_threshold": 9},
            "table 't0' evicts ids by their timestamps, and the batch has none: look up a "
            "KeyedJaggedTensorWithTimestamp",
        ),
        (
            {"policy_type": SHOW_CLICK, "showclick_params": rst.ShowClickParams(1, 1, 1)},
            "table 't0' scores ids by clicks (beta is not 0), and the batch has none: give it click labels, as "
            "docs/admission_eviction.md says",
        ),
    ],
)
def test_missing_signals_on_one_rank_fail_on_all(rank: int, rules: dict[str, Any], message: str) -> None:
    model, whole = sharded_model(rules), batch_of(3, 0, "age")
    rst.with_click_labels(whole.features, whole.click_labels)
    plain = KeyedJaggedTensor(["f0", "f1"], whole.features.values(), lengths=whole.features.lengths())
    given = plain if rank == 1 else whole.features  # rank 1's batch lacks the signals
    with pytest.raises(ValueError, match="and the batch has none") as raised:
        model(Batch(given, whole.click_labels))[0].backward()
    assert str(raised.value) == message
    model(Batch(whole.features, whole.click_labels))[0].backward()
    assert len(model.module.sparse.local_shard.table_ids("t0"))


def evaluated_ahead(rank: int, world_size: int) -> int:
    """Prefetches a batch in evaluation mode and trains it in training mode; returns the number of rows."""
    model = sharded_model({"admit_threshold": 2})
    sparse, batch = model.module.sparse, batch_of(3, rank, "age")
    model(batch)[0].backward()
    sparse.eval()
    coming = sparse.prefetch(batch.features)
    sparse.train()
    model(batch)[0].backward()
    sparse.forget(coming)
    return len(sparse.local_shard.table_ids("t0"))


def test_a_batch_prefetched_in_another_mode_is_exchanged_again(ranks_of: Start) -> None:
    ids = {i for rank in (0, 1) for feature in (0, 1) for i, *_ in lookups_of(3, rank, "age", feature)}
    assert sum(ranks_of(2).run(evaluated_ahead)) == len(ids), "the second time admits all of them"


@on_ranks(2)
def test_a_bound_is_divided_among_ranks() -> None:
    model, rules = Model(Scenario(), 0), rst.AdmitAndEvictConfig(max_rows=7, max_bytes=1001)
    configs = [bag_config(name, admit_and_evict_config=rules) for name in ("t0", "t1")]
    model.sparse = bags_collection(Place.device, *configs, cache=10)
    apply(model.sparse)
    whole: Any = shard(model, Scenario(sharding=("row_wise", "table_wise")))
    lifecycles = [table.lifecycle for table in whole.module.sparse.local_shard.embedding.tables]
    assert [(lifecycle.rule(Rows).most, lifecycle.rule(Bytes).most) for lifecycle in lifecycles] == [
        (3, 500),
        (7, 1001),
    ]


def owns(known: dict[str, Any], is_own: Callable[[int], bool]) -> dict[str, Any]:
    found = {"clocks": known["clocks"]}
    for ids, columns in (("ids", "columns"), ("candidates", "counted")):
        here = [place for place, one in enumerate(known[ids]) if is_own(one)]
        found[ids] = [known[ids][place] for place in here]
        found[columns] = {name: [values[place] for place in here] for name, values in known[columns].items()}
    return found


@on_ranks(2)
@pytest.mark.parametrize("kind", ["age_of_candidates", "share", "sketch", "half_life"])
def test_counters_move_to_the_owner_with_their_rows(rank: int, kind: str) -> None:
    """Sharding a collection that was trained in one process distributes its counters together with its rows."""
    for sharding in ("row_wise", "table_wise"):
        plain = Lookups(RULES[kind])
        for step in range(STEPS):
            batch = batch_of(step, 0, kind)
            plain(Batch(rst.with_click_labels(batch.features, batch.click_labels), batch.click_labels))[0].backward()
        before = table_state(plain.sparse.embedding.view("t0"))
        model: Any = shard(plain, Scenario(sharding=(sharding,)))
        after = table_state(model.module.sparse.local_shard.embedding.view("t0"))
        assert before["ids"]
        if sharding == "row_wise":
            assert owns(after, lambda _: True) == owns(before, lambda one: one % 2 == rank)
        elif rank == 0:
            assert after == before, "it has all, and the same sketch"


# ---- sketches in saves


THRESHOLD = 5


class OneFeature(torch.nn.Module):
    def __init__(self, size: int, home: Home = Home.MODULO) -> None:
        super().__init__()
        rules = rst.AdmitAndEvictConfig(admit_threshold=THRESHOLD, sketch_bytes=size)
        config = sequence_config("t0", ["f0"], admit_and_evict_config=rules)
        self.sparse = rst.EmbCacheEmbeddingCollection([config], cache=600, device=Place.device, home=home)
        rst.apply_optimizer_in_backward(torch.optim.SGD, self.sparse.parameters(), {"lr": 0.1})

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        rows: torch.Tensor = self.sparse(features)["f0"].values().sum()
        return rows


@dataclass
class ShardState:
    """The state of a rank's shard: its ids with rows, the ids of `range(300)` that it owns, and its sketch."""

    rows: list[int]
    home: list[int]
    sketch: list[int]


def ids_of(step: int, rank: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, 300, (150,), generator=random)


def train_sketch(model: Any, steps: range) -> None:
    for step in steps:
        ids = ids_of(step, Place.rank)
        model(KeyedJaggedTensor(["f0"], ids, lengths=torch.tensor([len(ids)]))).backward()


def shard_state(model: torch.nn.Module) -> ShardState:
    owner = table_owners(model)[0]
    view = owner.embedding.view("t0")
    every = np.arange(300, dtype=np.int64)
    return ShardState(view.ids().tolist(), every[owner.owned("t0", every)].tolist(), view.sketch().tolist())


def save(rank: int, world_size: int, size: int, path: str) -> ShardState:
    model = shard(OneFeature(size), Scenario(sharding=("row_wise",)))
    train_sketch(model, range(3))
    rst.Saver(rank).save(model, path)
    return shard_state(model)


def load(rank: int, world_size: int, size: int, path: str, home: Home, sharding: str) -> ShardState:
    model = shard(OneFeature(size, home), Scenario(sharding=(sharding,)))
    train_sketch(model, range(7, 9))  # the load replaces the state that this training leaves
    rst.Saver().load(model, path)
    return shard_state(model)


def estimates(state: list[int], ids: list[int]) -> dict[int, int]:
    width, depth, cell, _ = np.array(state[:32], np.uint8).view(np.int64).tolist()
    sketch = sketch_reference.Sketch(width * depth * cell, depth, THRESHOLD)
    cells = np.array(state[32:], np.uint8).reshape(depth, width)
    sketch.rows = [row.tolist() for row in cells]
    return {i: sketch.estimate(i) for i in ids}


@pytest.mark.parametrize("size", [2000, 160])
def test_sketches_load_on_other_owners(ranks_of: Start, tmp_path: Path, size: int) -> None:
    path = str(tmp_path)
    counts = Counter(torch.cat([ids_of(step, rank) for step in range(3) for rank in (0, 1)]).tolist())
    saved = ranks_of(2).run(save, size, path)
    with_rows = {i for each in saved for i in each.rows}
    waiting = counts.keys() - with_rows
    assert (len(waiting) > 100) == (size == 2000), "one of the sketches is too small"
    for world_size, home, sharding in (
        (2, Home.MODULO, "row_wise"),
        (2, Home.HASH, "row_wise"),
        (2, Home.MODULO, "table_wise"),
        (2, Home.MODULO, "data_parallel"),
        (4, Home.MODULO, "row_wise"),
    ):
        loaded = ranks_of(world_size).run(load, size, path, home, sharding)
        assert {i for each in loaded for i in each.rows} == with_rows
        for rank, each in enumerate(loaded):
            own = [i for i in each.home if i in waiting]
            assert all(count >= counts[i] for i, count in estimates(each.sketch, own).items())
            if (world_size, home, sharding) == (2, Home.MODULO, "row_wise"):
                assert each.sketch == saved[rank].sketch, "a rank that goes on has its own sketch, as it was"
    alone = OneFeature(size)
    rst.Saver().load(alone, path)
    known = shard_state(alone)
    assert all(count >= counts[i] for i, count in estimates(known.sketch, sorted(waiting)).items())
