"""The CPU benchmark: workloads and their bytes, counts and comparisons, targets, plans and policies."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from threads import threads

pytest.importorskip("torchrec", reason="tables are collections")
pytest.importorskip("fbgemm_gpu", reason="it is a rival")

from benchmarks import policy, rivals, targets
from benchmarks.bounds import CopyBound, step_bytes
from benchmarks.contenders import Collection, Ours
from benchmarks.cpu import Sample, cpu, workloads
from benchmarks.ids import STREAMS, Distribution, power_law_ranks, scatter, stream
from benchmarks.planning import Planner, make_engine, run_plans, shortage_of
from benchmarks.policy import OptimalCache, RoundRobin, movielens_items, run_policies
from benchmarks.runner import Row
from benchmarks.step import StepBench
from benchmarks.workload import TableSet, Workload, make_workload


def _workload(optimizer: str = "adagrad", pooled: bool = False, lookups: int = 256) -> Workload:
    return make_workload(TableSet(2, 500), 8, pooled, optimizer, lookups, 4)


def _options(**changes: Any) -> argparse.Namespace:
    """Returns the options of --quick with some of them changed."""
    return argparse.Namespace(**{**vars(cpu.parse(["--quick"])), **changes})


def _bench(workload: Workload, *names: str, **changes: Any) -> StepBench:
    return StepBench(workload, _options(**{"rivals": names, "cache": [], "index": False, **changes}))


def _case(**changes: Any) -> Row:
    key = {"table": targets.STEP, "optimizer": "sgd", "threads": 1, "distribution": "power law 1.05", "dim": 64}
    flags = {"form": "pooled", "correct": {"torch": True}, "ratios": {}, "ratios_of_medians": {}}
    return {**key, **flags, "over_copy_bound": 1.0, **changes}


def _compare(cases: list[Row], bandwidth: float = 30e9) -> Row:
    """Returns the judged targets by name, without the bound and the words about torch's cores."""
    every = [{"table": "copy", "threads": 1, "copy_bytes_per_second": bandwidth}, *cases]
    judged = [target.judge(every) for target in targets.cpu_targets(every)]
    return {re.sub(r", cores [^,]*|, at (least|most)$", "", target["target"]): target for target in judged}


def test_targets_of_torch_follow_the_copy_bandwidth() -> None:
    cases = [_case(ratios={"torch": ratio}) for ratio in (1.9, 1.3, 2.6)]
    for bandwidth, cores, wanted, met in (
        (19.9e9, "below 20", (1.5, 1.2), True),
        (20e9, "20 GB/s or", (2.5, 1.7), False),
    ):
        judged = _compare(cases, bandwidth)["torch sparse, sgd"]
        assert cores in judged["target"]
        assert (judged["median"], judged["worst"], judged["rows"]) == (1.9, 1.3, 3)
        assert (judged["wanted median"], judged["wanted worst"], judged["met"]) == (*wanted, met)


def test_the_worst_workload_is_judged_as_well() -> None:
    name = "collection over table-batched embedding"
    near = [_case(ratios={"ours": 1.0}, ratios_of_medians={"ours": 0.8}) for _ in range(2)]
    judged = _compare([*near, _case(ratios={"ours": 1 / 1.08})])[name]
    assert (judged["median"], judged["met"], judged["median of medians"]) == (1.0, True, 1.25)
    judged = _compare([*near, _case(ratios={"ours": 0.5})])[name]
    assert (judged["median"], judged["worst"], judged["met"]) == (1.0, 2.0, False)


def test_targets_take_their_own_cases_only() -> None:
    cases = [
        _case(form="sequence", over_copy_bound=1.5, ratios={"fbgemm": 2.0, "fbgemm-none": 1.8}),
        _case(over_copy_bound=1.7, ratios={"collection@0.1": 1.9}),
        _case(over_copy_bound=9.0, dim=32, distribution="uniform", ratios={"collection@0.1": 7.0}),
        _case(over_copy_bound=9.0, correct={"torch": False}),
        _case(over_copy_bound=9.0, threads=2, ratios={"torch": 0.1, "ours": 0.1}),
    ]
    found = _compare(cases)
    reached = {name: (target["median"], target["worst"], target["rows"]) for name, target in found.items()}
    assert reached["copy bound, D = 64, sequence"] == (1.5, 1.5, 1)
    assert reached["copy bound, D = 64, pooled"] == (1.7, 1.7, 1)
    assert reached["cache of 10% over all rows resident, power law 1.05, no prefetch"] == (1.9, 1.9, 1)
    assert reached["FBGEMM, sgd"][0] == 1.8
    assert found["torch sparse, sgd"]["met"] is found["plan, hash, 100 million rows, M ids/s"]["met"] is None
    assert reached["collection over table-batched embedding"][2] == 0


def test_plans_are_timed_with_one_and_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    plan = Planner.plan
    monkeypatch.setattr(Planner, "plan", lambda self, ids: (used.append(torch.get_num_threads()), plan(self, ids))[1])
    with threads(torch.get_num_threads()):
        sizes = {"plan_batch": 500, "plan_rows": 1000, "large_rows": 0, "rounds": 1, "threads": [1, 2]}
        hits = [row for row in run_plans(_options(**sizes)) if row["what"] == "hits"]
        assert torch.get_num_threads() == 1
    assert used.count(2) == 8, "a warm batch and a timed one, of two kinds of table and two distributions"
    kinds = [(kind, count) for kind in ("hash", "index") for count in (1, 1, 2, 2)]
    assert [(row["kind"], row["threads"]) for row in hits] == kinds
    alone = {(row["kind"], row["ids"]): row["M ids/s"] for row in hits if row["threads"] == 1}
    for row in hits[2:4]:
        assert row["two threads over one"] == row["M ids/s"] / alone[row["kind"], row["ids"]]
    found = _compare([{**row, "rows": 1_000_000, "M ids/s": 40.0, "two threads over one": 1.5} for row in hits])
    assert found["plan, hash, 1 million rows, M ids/s"]["worst"] == 40
    assert found["plan, index table, M ids/s"]["rows"] == 2
    speedup = found["plan, hash, 1 million rows, two threads over one"]
    assert (speedup["worst"], speedup["rows"], speedup["met"]) == (1.5, 2, False)


def test_contenders_take_turns_in_changing_order(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = _bench(_workload("sgd"), "torch", cache=[0.5], index=True, rounds=8)
    turns: list[str] = []
    for contender in bench.contenders:
        backward = contender.backward
        monkeypatch.setattr(
            contender, "backward", lambda raw, call=backward, name=contender.name: (turns.append(name), call(raw))[1]
        )
    case = bench.run(Distribution(0.0))
    assert list(case["times"]) == ["collection", "ours", "torch", "collection@0.5", "collection-index"]
    timed = turns[-8 * len(bench.contenders) :]
    rounds = [tuple(timed[i : i + len(bench.contenders)]) for i in range(0, len(timed), len(bench.contenders))]
    assert all(sorted(names) == sorted(rounds[0]) for names in rounds)
    assert len(set(rounds)) > 2


@pytest.mark.parametrize("pooled", [False, True])
def test_gradients_are_laid_out_as_a_model_returns_them(pooled: bool) -> None:
    collection = Collection(_workload("sgd", pooled))
    raw = collection.forward(collection.inputs(collection.workload.draw(Distribution(0.0), np.random.default_rng(0))))
    grads = collection._grads
    assert [part.shape for part in raw] == [grad.shape for grad in grads]
    assert len(raw) == (1 if pooled else 2)
    storages = {grad.untyped_storage().data_ptr() for grad in grads}
    assert len(storages) == len(grads), "a feature's gradient lies in memory of its own"
    together = torch.cat(grads)
    assert torch.equal(together, collection.workload.gradient(0))


@pytest.mark.parametrize("kind", [Collection, Ours])
@pytest.mark.parametrize("pooled", [False, True])
def test_contenders_read_the_weights_of_the_table(kind: type[Ours], pooled: bool) -> None:
    """After a step, weights of cached and uncached rows are read by a lookup that changes nothing."""
    twins = [kind(make_workload(TableSet(2, 500), 8, pooled, "adagrad", 256, 4), cache) for cache in (1.0, 0.5)]
    ids = twins[0].workload.draw(Distribution(1.05), np.random.default_rng(0))
    for twin in twins:
        before = [twin.weights(table, ids[table]) for table in (0, 1)]
        twin.step(ids)
        assert all((twin.weights(table, ids[table]) != before[table]).any() for table in (0, 1))
    collection = Collection(twins[0].workload)
    collection.step(ids)
    state = collection.module.state_dict()
    prefix = "embedding_bags" if pooled else "embeddings"
    for table in (0, 1):
        known, weight = (state[f"{prefix}.t{table}.{part}"] for part in ("ids", "weight"))
        for twin in twins:
            assert torch.equal(twin.weights(table, known), weight)
    whole = torch.zeros(2, 500, 8)
    for table, begin, rows in twins[0].chunks():
        whole[table, begin : begin + len(rows)] = rows
    assert torch.equal(whole[1], twins[1].weights(1, torch.arange(500)))


def test_samples_are_added_to_the_product_of_the_axes() -> None:
    samples = ["--samples", "1x300:pooled:adam", "criteo@300:pooled:sgd"]
    options = cpu.parse(["--quick", *samples, "--optimizers", "sgd", "--forms", "sequence"])
    found = [(each.tables.name, each.optimizer, chosen.cache, chosen.index) for each, chosen in workloads(options)]
    assert found == [("2x500", "sgd", [0.5], True), ("1x300", "adam", [], False), ("criteo@300", "sgd", [], False)]
    assert cpu.parse(["--tables", "2x500"]).samples == []


@pytest.mark.parametrize(
    "text",
    ["1x4m", "1x4m:sequence", "1x4m:sequence:sgd:x", "1x4m:flat:sgd", "1x4m:pooled:rmsprop", "criteo:sequence:sgd"],
)
def test_bad_samples(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=text):
        Sample.parse(text)


def test_a_sequence_of_criteo_is_refused() -> None:
    with pytest.raises(SystemExit):
        cpu.parse(["--tables", "criteo", "--forms", "sequence"])
    with pytest.raises(ValueError, match="one dim"):
        make_workload(TableSet.parse("criteo"), 64, False, "sgd", 65536, 16)


def test_criteo() -> None:
    tables = TableSet.parse("criteo")
    assert (tables.name, tables.count, max(tables.sizes), min(tables.sizes)) == ("criteo", 26, 400_000, 3)
    assert TableSet.parse("CRITEO@20k").sizes[:4] == (1460, 583, 20_000, 20_000)
    workload = make_workload(tables, 64, True, "adagrad", 65536, 16)
    assert {dim: workload.dims.count(dim) for dim in workload.dims} == {64: 7, 32: 8, 16: 11}
    assert (workload.bag, workload.batch_size, workload.lookups) == (1, 2520, 65520)
    assert workload.output_elements == 2520 * sum(workload.dims)
    assert workload.table_bytes == sum(8 * n * d for n, d in zip(tables.sizes, workload.dims, strict=True))
    ids = workload.draw(Distribution(0.0), np.random.default_rng(0))
    assert all(int(part.max()) < rows for part, rows in zip(ids, tables.sizes, strict=True))


def test_mixed_tables_agree_with_every_rival() -> None:
    workload = make_workload(TableSet.parse("criteo@300"), 16, True, "adagrad", 26 * 40, 16)
    bench = _bench(workload, "torch", "fbgemm", "torchrec", index=True)
    case = bench.run(Distribution(1.05))
    assert case["correct"] == dict.fromkeys(("ours", "torch", "fbgemm", "torchrec", "collection-index"), True)
    assert case["counters"]["collection"]["unique_rows"] == 2 * case["unique_rows"]
    assert case["bytes"]["written"] == pytest.approx(
        sum(
            4 * dim * unique * (1 + workload.states_of(dim))
            for dim, unique in zip(workload.dims, case["unique_rows_of_tables"], strict=True)
        )
    )


def test_bytes_of_a_step() -> None:
    workload = Workload(TableSet(2, 500), 8, False, "adam", 256, 4)
    streams, read, written = step_bytes(workload, [60, 40])
    assert streams == 8 * 256 + 8 * 256 * 8
    assert read == 4 * 8 * 100 * (1 + 3)
    assert written == 4 * 8 * 100 * 3
    pooled = Workload(TableSet(2, 500), 8, True, "sgd", 256, 4)
    assert step_bytes(pooled, [50, 50]) == (8 * 256 + 8 * 64 * 8, 2 * 3200, 3200)
    mixed = make_workload(TableSet.parse("criteo"), 64, True, "rowwise_adagrad", 26 * 10, 1)
    unique = [float(table == 0) + 2 * (table == 2) for table in range(26)]  # one row with D = 32, two with D = 64
    rows = 4 * (32 + 2 * 64)
    assert step_bytes(mixed, unique) == (8 * 260 + 8 * 10 * sum(mixed.dims), 2 * rows + 12, rows + 12)


def test_the_copy_bound_counts_bytes_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.bounds.best_of", lambda call, repeats: 2.0)
    bound = CopyBound(1000, 1)
    assert bound.observe() == 2 * 1000 / 2
    workload = Workload(TableSet(2, 500), 8, True, "sgd", 256, 4)
    seconds = sum(step_bytes(workload, [50, 50])) / 1000
    found = bound.over({"unique_rows_of_tables": [50, 50], "collection": 2e3 * seconds}, workload)
    assert found == {"copy_bound_ms": 1e3 * seconds, "over_copy_bound": pytest.approx(2)}


def test_a_wrong_rival_is_marked() -> None:
    bench = _bench(_workload("sgd"), "torch")
    (rival,) = [contender for contender in bench.contenders if isinstance(contender, rivals.TorchSparse)]
    for group in rival._optimizer.param_groups:
        group["lr"] *= 1.5
    bound = CopyBound(1 << 20, 1)
    bound.observe()
    case = {**bench.run(Distribution(0.0)), "threads": 1}
    case |= bound.over(case, bench.workload)
    assert case["correct"] == {"ours": True, "torch": False}
    assert list(case["ratios"]) == ["ours"]
    assert "torch" in case["times"]
    counted = {name for name, target in _compare([case]).items() if target["rows"]}
    assert counted == {"collection over table-batched embedding"}


def test_a_wrong_table_batched_embedding_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = _bench(_workload("sgd"))
    ours = bench.contenders[1]
    assert ours.name == "ours"
    monkeypatch.setattr(ours, "_grad", ours.workload.gradient(1))  # type: ignore[attr-defined]
    case = bench.run(Distribution(0.0))
    assert case["correct"] == {"ours": False}
    assert case["ratios"] == {}


def test_a_cache_that_a_batch_does_not_fit_in() -> None:
    workload = _workload("sgd", lookups=1024)
    bench = _bench(workload, cache=[0.02])
    case = bench.run(Distribution(0.0))
    assert "distinct rows" in case["skipped"]["collection@0.02"]
    assert list(case["times"]) == ["collection", "ours"]


def test_fbgemm_forms_agree() -> None:
    bench = _bench(_workload("adagrad"), "fbgemm", "fbgemm-none")
    case = bench.run(Distribution(1.05))
    assert case["correct"] == dict.fromkeys(("ours", "fbgemm", "fbgemm-none"), True)


def test_power_law_has_its_probabilities() -> None:
    ranks = power_law_ranks(np.random.default_rng(0), 20, 1.05, 200_000)
    wanted = np.arange(1, 21) ** -1.05
    np.testing.assert_allclose(np.bincount(ranks, minlength=20) / 200_000, wanted / wanted.sum(), atol=0.005)
    one = power_law_ranks(np.random.default_rng(0), 7, 1.0, 10_000)
    assert (one.min(), one.max()) == (0, 6)


def test_ids_are_scattered_by_a_bijection() -> None:
    ids = scatter(np.arange(1000), 1000, shift=3)
    assert sorted(ids) == list(range(1000))
    assert np.abs(np.diff(ids)).min() > 100


def test_scanning_stationary_and_drifting_streams() -> None:
    scan = stream("scan", 10, 4, 1.05, 0)
    assert [next(scan).tolist() for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
    still, moving = (stream(kind, 1000, 50, 1.05, 0) for kind in ("stationary", "drifting"))
    pairs = [(next(still), next(moving)) for _ in range(11)]
    assert all((a == b).all() for a, b in pairs[:10])
    assert (pairs[10][0] != pairs[10][1]).any()


def test_round_robin_on_a_known_case() -> None:
    hand = RoundRobin(10, 3)
    for ids in ([0, 1], [2, 0], [3, 0], [1, 3]):
        hand.plan(np.array(ids))
    # 0, 1, 2 fill the slots; 3 takes the slot of 1, as 0 is needed; 1 takes the slot of 2.
    counted = {"lookups": 8, "unique_rows": 8, "unique_misses": 5, "rows_in": 5, "rows_out": 2}
    assert hand.counters == counted
    with pytest.raises(ValueError, match="4 distinct rows"):
        hand.plan(np.array([0, 1, 2, 3]))


def test_engine_counts_on_a_known_case() -> None:
    planner = Planner(make_engine(10, 3))
    for ids in ([0, 1], [2, 0], [3, 0], [1, 3]):
        planner.plan(np.array(ids))
    counted = planner.engine.tables.stats()
    # Least recently used: 3 takes the slot of 1, then 1 takes the slot of 2.
    assert (counted["unique_misses"], counted["rows_in"], counted["rows_out"]) == (5, 5, 2)
    assert counted["bytes_out"] == 2 * planner.engine.record_bytes


def test_policies_see_the_same_stream() -> None:
    chosen = {"policy_rows": 1000, "policy_batch": 20, "policy_steps": 40, "policies": ["lru", "lrfu", "look_ahead"]}
    runs = list(run_policies(_options(**chosen)))
    names = ["lru", "lrfu", "look_ahead", *(f"look_ahead, {depth} announced" for depth in (1, 4, 12))]
    names += ["round robin (simulated)", "Belady (simulated)"]
    assert [(r["stream"], r["policy"]) for r in runs] == [(s, n) for s in STREAMS for n in names]
    for first in range(0, len(runs), len(names)):
        misses = [run["unique_misses"] for run in runs[first : first + len(names)]]
        assert len({run["unique_rows"] for run in runs[first : first + len(names)]}) == 1
        assert min(misses) == misses[-1], "nothing is better than Belady's optimum"
        assert misses[1] == misses[2], "with nothing announced there is nothing to look ahead to"
        assert misses[5] <= misses[4] <= misses[3] <= misses[2]


def test_the_optimum_of_a_known_case() -> None:
    batches = [np.array(ids) for ids in ([0, 1], [2], [3], [1], [0], [2])]
    optimum = OptimalCache(4, 2, batches)
    for ids in batches:
        optimum.plan(ids)
    # Id 0 is evicted for 2, 2 for 3, 3 for 0, and finally 0 or 1 for 2. The only hit is id 1 in the fourth batch.
    assert (optimum.counters["unique_misses"], optimum.counters["rows_out"]) == (6, 4)


def test_items_in_time_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "u.data").write_text("1\t7\t3\t30\n2\t5\t3\t10\n1\t6\t4\t20\n")
    assert movielens_items(tmp_path).tolist() == [4, 5, 6]
    monkeypatch.setattr(policy, "WARM", 1)
    runs = run_policies(_options(policies=["lru"], movielens=tmp_path, policy_rows=100, policy_steps=1))
    found = [(run["rows"], run["unique_misses"]) for run in runs if run["stream"] == "MovieLens items"]
    assert found == [(7, 2)] * 3, "the first item is warm-up"


def test_a_table_that_does_not_fit_reports_its_size() -> None:
    assert "GiB" in str(shortage_of(10**13))
    assert shortage_of(1000) is None


@pytest.mark.parametrize("text", ["4", "x", "0x5", "2x0", "axb", "criteo@", "criteo@0", "criteo5k"])
def test_bad_table_sets(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"{text!r} is not COUNTxROWS"):
        TableSet.parse(text)
