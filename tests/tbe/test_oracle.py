"""The central test: random tables, batches, cache policies and optimizers against plain torch, at every cache size.

Outputs, weights and optimizer states match the float64 reference after 20 steps. They are bit-identical whether
the cache holds exactly one batch or the whole table.
"""

from __future__ import annotations

import contextlib
import gc
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from embeddings import embedding_of
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.strategies import SearchStrategy
from lifecycle_reference import LifecycleReference
from optimizer_table import BY_NAME
from oracle_events import clip, collect, fill_counts, loaded, norm_of, norms, warm
from oracle_evictions import (
    Result,
    compare_evicted,
    exercise_evictions,
    exercise_reference_evictions,
    keeps_evicted,
    record_evicted,
    take_evicted_rows,
)
from oracle_scenarios import BATCH, EVENTS, STORES, WITHOUT_FORWARD, Scenario, Step, scenarios
from reference import Reference

import rec_sdk_torch
from rec_sdk_torch import _engine, rules
from rec_sdk_torch.operators.devices.backends import Backend
from rec_sdk_torch.operators.schemas import parallel_runner
from rec_sdk_torch.tbe import TableBatchedEmbedding, TableOptimizer
from rec_sdk_torch.tbe.cache import device_cache, transfers
from rec_sdk_torch.tbe.cache.swap import Swap
from rec_sdk_torch.tbe.config.lifecycle import IdSignals
from rec_sdk_torch.tbe.step.prefetch_queue import Prefetched

_engine.set_parallel_runner(*parallel_runner(), from_lookups=0)  # runs even small batches on several threads


one_launch = [False]
"""Whether new caches swap and look up in one call."""


@pytest.fixture(autouse=True)
def launches_as_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    made = device_cache.backend_for

    def backend_for(device: torch.device) -> Backend:
        backend = made(device)
        return replace(backend, joins_lookups=one_launch[0] and not backend.reaches_host)

    monkeypatch.setattr(device_cache, "backend_for", backend_for)


def make(scenario: Scenario, cache: dict[str, int], device: torch.device) -> TableBatchedEmbedding:
    one_launch[0] = scenario.one_launch
    row = BY_NAME[scenario.optimizer]
    kwargs = dict(row.options)
    if scenario.accumulates:
        kwargs |= {"use_accumulate": True, "accumulate_step": scenario.window}
    if scenario.max_gradient < float("inf"):
        kwargs |= {"gradient_clipping": True, "max_gradient": scenario.max_gradient}
    cls = row.class_of(scenario.window if scenario.accumulates else 1)
    optimizer = TableOptimizer.create(cls, kwargs)
    if scenario.narrow:
        optimizer = TableOptimizer.create(cls, kwargs | {"state_dtypes": scenario.state_dtypes(optimizer)})
    embedding = embedding_of(
        *scenario.tables,
        optimizer=optimizer,
        cache=dict(cache),
        device=device,
        seed=scenario.seed,
        cache_policy=scenario.policy,
        update=scenario.update,
        host_store=tempfile.mkdtemp(dir=STORES.name) if scenario.on_disk else None,
    )
    if scenario.frozen is not None:
        embedding.freeze(scenario.frozen)
    if scenario.counts and scenario.update == "backward":
        embedding.count_grad_norms()
    return embedding


def flat(step: Step, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    bags = [bag for feature in step.features for bag in feature]
    indices = torch.from_numpy(np.concatenate(bags))
    offsets = torch.from_numpy(np.cumsum([0, *map(len, bags)]))
    weights = None
    if step.weights is not None:
        weights = torch.cat([w for feature in step.weights for w in feature]).to(device).requires_grad_()
    return indices, offsets, weights


def signals_of(step: Step, device: torch.device) -> dict[str, torch.Tensor]:
    """Returns the click label and the timestamp of each lookup."""
    arrays = {"clicks": step.clicks, "timestamps": step.timestamps}
    joined = {name: np.concatenate([bag for f in of for bag in f]) for name, of in arrays.items()}
    return {name: torch.from_numpy(array).to(device) for name, array in joined.items()}


def smallest_caches(scenario: Scenario) -> dict[str, int]:
    """Returns the smallest cache sizes that hold any batch together with the batches in flight."""
    need = dict.fromkeys((table.name for table in scenario.tables), 1)
    for index, table in enumerate(scenario.tables):
        in_flight: set[int] = set()
        passes = 0
        for number, done in scenario.actions():
            step = scenario.steps[number]
            if step.event not in ("eval", *WITHOUT_FORWARD):
                now = in_flight | scenario.ids(index, step)
                need[table.name] = max(need[table.name], len(now))
                in_flight = now if step.event != "abandon" else in_flight
            passes += len(done)
            # under update="step", rows are held until step()
            held = scenario.update == "step" and passes % scenario.window
            in_flight = set() if done and not held else in_flight
    return need


NORMS = (2.0, float("inf"))
"""p of the norms of gradients that are compared."""


def by_feature(output: torch.Tensor, scenario: Scenario) -> list[torch.Tensor]:
    dims = [t.embedding_dim for t in scenario.tables for _ in range(t.num_features)]
    return list(output.split(dims, dim=1))


def with_separate_features(
    embedding: TableBatchedEmbedding, indices: torch.Tensor, offsets: torch.Tensor, extras: dict[str, torch.Tensor]
) -> Prefetched:
    """Builds a batch whose features have separate outputs, and so separate gradients."""
    keys = np.arange(embedding.num_features)
    return Prefetched(indices, offsets, BATCH, keys, False, offsets, signals=IdSignals(**extras))


def forward(
    embedding: TableBatchedEmbedding,
    scenario: Scenario,
    step: Step,
    device: torch.device,
    prefetched: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Returns the output of each feature, doubled in place. Doubling is exact, and callers may change outputs."""
    indices, offsets, weights = flat(step, device)
    extras = signals_of(step, torch.device("cpu"))
    if prefetched is not None:
        indices, offsets = prefetched
    if not scenario.sequence:
        return by_feature(embedding(indices, offsets, weights, **extras).mul_(2), scenario), weights
    if scenario.joined:
        lengths = [sum(map(len, feature)) for feature in step.features]
        return list(embedding(indices, offsets, **extras).mul_(2).split(lengths)), None
    keys = np.arange(embedding.num_features)
    batch = embedding.queue.batch(offsets, indices, offsets, BATCH, keys, None, signals=IdSignals(**extras))
    outputs = embedding.lookup_features(batch)
    return [output.mul_(2) for output in outputs], None


class Prefetcher:
    """A prefetcher of the next `depth` training batches."""

    def __init__(self, embedding: TableBatchedEmbedding, scenario: Scenario, depth: int, device: torch.device) -> None:
        self.embedding, self.scenario, self.depth, self.device = embedding, scenario, depth, device
        self.rng = np.random.default_rng(scenario.seed + depth)
        self.upcoming = [i for i, event in enumerate(scenario.events) if event in ("train", "overlap", "abandon")]
        self.given: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def step(self, index: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Prefetches before step `index`; returns the tensors for its forward, or None if the forward may use
        copies.
        """
        if not self.depth:
            return None
        for number in [i for i in self.upcoming if i >= index][: self.depth + 1]:
            if number not in self.given and self.rng.random() < 0.95:
                indices, offsets, weights = flat(self.scenario.steps[number], self.device)
                where = self.device if self.rng.random() < 0.3 else torch.device("cpu")
                self.given[number] = indices.to(where), offsets.to(where)
                extras = signals_of(self.scenario.steps[number], where)
                with contextlib.suppress(RuntimeError):  # raised if too many prefetched batches had no forward
                    if self.scenario.sequence and not self.scenario.joined:
                        self.embedding.queue.add(with_separate_features(self.embedding, *self.given[number], extras))
                    else:
                        self.embedding.prefetch(*self.given[number], weights, **extras)
        if self.rng.random() < 0.7:
            self.embedding.queue.wait()
        return self.given.get(index) if self.rng.random() < 0.8 else None


def run(scenario: Scenario, cache: dict[str, int], device: torch.device, depth: int = 0) -> Result:
    """Trains the scenario; returns every output, gradient, weight and state by name."""
    embedding = make(scenario, cache, device)
    result: Result = {}
    saved: dict[str, torch.Tensor] = {}
    optimizer = embedding.optimizers[0]
    assert optimizer is not None
    forwards: dict[int, tuple[list[torch.Tensor], torch.Tensor | None]] = {}
    ahead = Prefetcher(embedding, scenario, depth, device)
    passes = 0
    for index, done in scenario.actions():
        step = scenario.steps[index]
        embedding.train(step.event != "eval")
        prefetched = ahead.step(index)
        if step.event == "fail":
            fail(embedding, scenario, step, device)
        elif step.event == "save":
            saved = embedding.state_dict()
            result.update({f"saved{index}.{name}": value for name, value in saved.items()})
        elif step.event == "warm":
            warm(embedding, scenario, step)
        elif step.event == "fill":
            fill_counts(embedding, scenario, step)
        elif step.event == "leave":
            exercise_evictions(embedding, scenario, index, result)
        elif step.event == "load":
            result[f"loaded{index}"] = torch.tensor(loaded(embedding, saved))
        else:
            outputs, weights = forward(embedding, scenario, step, device, prefetched)
            result.update({f"output{index}.{f}": output.detach().cpu() / 2 for f, output in enumerate(outputs)})
            if step.event in ("train", "overlap"):
                forwards[index] = outputs, weights
            del outputs, weights
        gc.collect(0)  # an abandoned forward releases its pins when its graph is freed
        for number in done:
            outputs, weights = forwards.pop(number)
            optimizer.options["lr"] = scenario.steps[number].lr
            backward(outputs, [grad.to(device) / 2 for grad in scenario.steps[number].grads], weights)
            if weights is not None and weights.grad is not None:
                result[f"weights_grad{number}"] = weights.grad.cpu()
            if scenario.counts and number % 2:
                result |= {f"norms{number}.{p}": norms(embedding, p) for p in NORMS}
            passes += 1
            if scenario.update == "step" and not passes % scenario.window:
                if scenario.max_norm < float("inf"):
                    result[f"clipped{number}"] = clip(embedding, scenario.max_norm)
                embedding.apply_gradients()
    for table in embedding.tables:
        collect(embedding, table.name, result)
        if keeps_evicted(table):
            take_evicted_rows(embedding, table.name, result, "end")
    return result


def backward(outputs: list[torch.Tensor], grads: list[torch.Tensor], weights: torch.Tensor | None = None) -> None:
    """Runs the backward pass, after a first one for the gradient of the per-sample weights alone, which must train
    nothing.

    Features of a frozen table have no gradient.
    """
    pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if output.requires_grad]
    of_outputs, of_grads = [output for output, _ in pairs], [grad for _, grad in pairs]
    first = None
    if weights is not None:
        (first,) = torch.autograd.grad(of_outputs, weights, of_grads, retain_graph=True, allow_unused=True)
    torch.autograd.backward(of_outputs, of_grads)
    if weights is not None and first is not None:
        assert weights.grad is not None
        assert torch.equal(first, weights.grad)


def fail(embedding: TableBatchedEmbedding, scenario: Scenario, step: Step, device: torch.device) -> None:
    """Runs a batch that fails after every group has planned it; the failure must not affect later results."""

    last = embedding.groups[-1]
    plan_batch = last.plan

    def planted(batch: Any, announced: Any = None) -> Any:
        plan_batch(batch, announced)
        raise OSError("planted")

    with embedding.exclusive():  # drops all plans, since one may have the same ids as this batch
        last.plan = planted  # type: ignore[method-assign]
    # A batch that does not fit into the cache beside the batches in flight is refused earlier.
    with pytest.raises((OSError, rec_sdk_torch.CacheTooSmallError)):
        forward(embedding, scenario, step, device)
    del last.plan


def reference_run(scenario: Scenario, device: torch.device) -> tuple[Result, Reference]:
    fresh = make(scenario, dict.fromkeys((t.name for t in scenario.tables), 1), device)
    ids, initial = [], []
    for index, table in enumerate(scenario.tables):
        every = np.array(sorted(set().union(*(scenario.ids(index, step) for step in scenario.steps))), np.int64)
        ids.append(every)
        initial.append(fresh.view(table.name).read(torch.from_numpy(every), ["weight"]).parts["weight"])
    reference = Reference(scenario, ids, initial)
    result: Result = {}
    forwards = {}
    pending: list[int] = []
    for index, done in scenario.actions():
        step = scenario.steps[index]
        pending += [index] if step.event in ("train", "overlap") else []
        if step.event == "leave":
            exercise_reference_evictions(
                reference, scenario, index, [scenario.steps[i].features for i in pending], result
            )
        if step.event == "fill":
            for table in range(len(scenario.tables)):
                reference.fill_counts(table, scenario.ids(table, step))
        if step.event not in WITHOUT_FORWARD:
            if step.trains:
                reference.begin_batch(step.features, step.clicks, step.timestamps)
            outputs = forwards[index] = reference.forward(step.features, step.weights)
            tolerances = reference.tolerances(step.features, step.weights)
            for feature, (output, tolerance) in enumerate(zip(outputs, tolerances, strict=True)):
                result[f"output{index}.{feature}"] = output.detach().clone()
                result[f"tolerance{index}.{feature}"] = tolerance
        pending = [] if done else pending
        for number in done:
            backward(forwards[number], [grad.double() for grad in scenario.steps[number].grads])
            in_flight = [scenario.steps[later].features for later in done if later > number]
            reference.after_backward(scenario.steps[number].lr, scenario.steps[number].features, in_flight)
            if scenario.max_norm < float("inf") and not reference.backwards % scenario.window:
                result[f"clipped{number}"] = torch.tensor(reference.last_norm)
            for p in NORMS if scenario.counts and number % 2 else ():
                grads = [reference.last_gradients.get(table.name) for table in scenario.tables]
                result[f"norms{number}.{p}"] = torch.stack([norm_of(grad, p) for grad in grads])
    for index, table in enumerate(scenario.tables):
        if keeps_evicted(table):
            record_evicted(table.name, reference.evicted[index], result, "end")
    return result, reference


def compare_lifecycle(name: str, result: Result, lifecycle: LifecycleReference) -> None:
    """Compares a table's ids and counters with the reference."""
    ids, candidates = result[f"{name}.ids"].tolist(), result[f"{name}.candidate ids"].tolist()
    assert set(ids) == set(lifecycle.rows), f"{name}: rows"
    assert candidates == sorted(lifecycle.candidates), f"{name}: candidates"
    for kind, known, of in (("row", ids, lifecycle.rows), ("candidate", candidates, lifecycle.candidates)):
        prefix = f"{name}.{kind} "
        for key in [key for key in result if key.startswith(prefix) and key != f"{prefix}ids"]:
            assert result[key].tolist() == [getattr(of[i], key.removeprefix(prefix)) for i in known], key
    sketch = b"" if lifecycle.sketch is None else lifecycle.sketch.state()
    assert bytes(result[f"{name}.sketch"].tolist()) == sketch, f"{name}: sketch"
    clocks = lifecycle.batches, lifecycle.steps, lifecycle.latest if lifecycle.rules.rule(rules.Age) else -(2**63)
    assert clocks == tuple(int(result[f"{name}.clock {clock}"]) for clock in ("batches", "steps", "timestamp"))
    assert int(result[f"{name}.evicted"]) == lifecycle.evicted


def compare(scenario: Scenario, result: Result, device: torch.device) -> None:
    close = {"rtol": 1e-4, "atol": 1e-4}
    expected, reference = reference_run(scenario, device)
    for name in [name for name in expected if name.startswith("output")]:
        error = (result[name].double() - expected[name]).abs()
        allowed = 1e-4 * expected[name.replace("output", "tolerance")]
        assert (error <= allowed).all(), f"{name}: {error.max()} off, {allowed[error > allowed]} allowed"
    for name in [name for name in expected if name.startswith(("norms", "clipped"))]:
        torch.testing.assert_close(result[name], expected[name], rtol=1e-5, atol=1e-5, msg=name)
    for name in [name for name in expected if re.search(r"\.(left|back|removed)", name)]:
        compare_evicted(name, result, expected)
    for index, table in enumerate(scenario.tables):
        ids = result[f"{table.name}.ids"].tolist()
        if table.hashed:
            lifecycle = reference.lifecycles[index]
            if lifecycle is not None and table.name != scenario.frozen:
                compare_lifecycle(table.name, result, lifecycle)
        if table.hashed and table.name == scenario.frozen:
            assert not ids, "what is frozen gets no row"
        elif table.hashed and table.lifecycle is None:
            assert set(ids) == reference.seen[index], "eval must insert nothing, training everything"
        kept = [row for row, i in enumerate(ids) if i in reference.row_of[index]]
        rows = [reference.row_of[index][ids[row]] for row in kept]
        weight = result[f"{table.name}.weight"][kept].double()
        torch.testing.assert_close(weight, reference.weights[index].detach()[rows], **close)
        for name in BY_NAME[scenario.optimizer].states:
            state = result[f"{table.name}.{name}"][kept].double()
            torch.testing.assert_close(state, reference.state(index, name)[rows], **close)


def check(scenario: Scenario, device: torch.device) -> None:
    small = smallest_caches(scenario)
    whole = {t.name: 4000 if t.hashed else t.num_embeddings for t in scenario.tables}
    between = {name: (3 * rows) // 2 + 1 for name, rows in small.items()}
    result = run(scenario, small, device)
    others = [(between, device, False), (whole, device, False), (small, device, True)]
    if device.type != "cpu":  # every backend sums in the same order, so results are bit-identical
        others.append((small, torch.device("cpu"), False))
    # Neither another policy, rows on disk, nor updates at step() change a result.
    policies = _engine.cache_policies()
    policy = policies[(policies.index(scenario.policy) + 1) % len(policies)]
    other = scenario.with_other_update().varied(policy=policy, on_disk=not scenario.on_disk)

    def norms_off(where: torch.device) -> float:
        return 0.0 if (other.update, where) == (scenario.update, device) else 1e-6

    for cache, where, late in others:
        # With `late`, no write-back counts as complete, so the host waits for every row.
        with mock.patch.object(Swap, "_is_downloaded", return_value=False) if late else contextlib.nullcontext():
            again = run(other, cache, where)
        now = f"{cache} rows on {where}{', rows late' if late else ''}"
        same_bits(result, again, f"{small} rows on {device}", now, norms_off(where))
    # Other devices are bit-identical to the CPU, so only the CPU is compared with the reference. Rules by norm are not
    # compared, since the reference's float64 norms differ.
    if device.type == "cpu" and not any(
        table.lifecycle and table.lifecycle.rule(rules.Norm) for table in scenario.tables
    ):
        compare(scenario, result, device)
    if scenario.rounded is not None:
        rounded, again = run(scenario.with_rounding(), small, device), other.with_rounding()
        cpu = torch.device("cpu")
        same_bits(rounded, run(again, whole, cpu), f"{small} rows", f"{whole} rows", norms_off(cpu))
        stored = run(other.with_rounding(torch.float32), between, device)
        same_bits(widened(rounded), widened(stored), "stored as cached", "stored in float32", norms_off(device))


def widened(result: Result) -> Result:
    """Returns the result with 16-bit values converted to float32."""
    return {name: value.float() if value.dtype.itemsize == 2 else value for name, value in result.items()}


def same_bits(result: Result, again: Result, one: str, other: str, norms_off: float = 0.0) -> None:
    """Checks that two results are bit-identical, except norms, whose relative difference may be `norms_off`.

    Kernels and torch add up the squares of a norm in different orders.
    """
    assert again.keys() == result.keys()
    for name, value in result.items():
        assert (value.dtype, value.shape) == (again[name].dtype, again[name].shape)
        off = norms_off if name.startswith("norms") else 0.0
        same = torch.equal(value, again[name]) or torch.allclose(value, again[name], rtol=off, atol=0, equal_nan=True)
        assert same, f"{name} differs between {one} and {other}"  # equal_nan, because float16 may overflow


@pytest.fixture(autouse=True, scope="module")
def staging_without_old_records() -> Iterator[None]:
    """Fills uninitialized staging memory with NaN, so that stale records are detected."""
    staging = transfers._staging

    def filled(*arguments: Any) -> torch.Tensor:
        return (
            staging(*arguments).view(torch.uint8).fill_(0xFF).view(arguments[3] if len(arguments) > 3 else torch.uint8)
        )

    with mock.patch.object(transfers, "_staging", filled):
        yield


def for_each_scenario(
    check_scenario: Callable[[Scenario], None],
    scenarios: SearchStrategy[Scenario],
    config: pytest.Config,
    few: int,
    many: int,
) -> None:
    """Checks `few` random scenarios, or `many` in the full suite; they depend on the day and the device."""
    count = config.getoption("--scenarios") or (many if config.getoption("--full") else few)
    day = seed(f"{config.getoption('--day')} on {config.getoption('--device')}")
    every = settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
    day(every(given(scenarios)(check_scenario)))()


def test_oracle(device: torch.device, pytestconfig: pytest.Config) -> None:
    for_each_scenario(lambda scenario: check(scenario, device), scenarios(), pytestconfig, few=45, many=150)


def test_prefetched_batches_change_nothing(device: torch.device, pytestconfig: pytest.Config) -> None:
    drawn = scenarios((*EVENTS, "save", "load"), (1, 4))
    for_each_scenario(lambda scenario: check_ahead(scenario, device), drawn, pytestconfig, few=25, many=60)


def check_ahead(scenario: Scenario, device: torch.device) -> None:
    small = smallest_caches(scenario)
    result = run(scenario, small, device)
    deep = {name: (scenario.depth + 1) * rows for name, rows in small.items()}
    between = {name: rows + rows // 2 for name, rows in small.items()}
    for cache, late in ((small, False), (between, False), (deep, False), (deep, True)):
        with mock.patch.object(Swap, "_is_downloaded", return_value=False) if late else contextlib.nullcontext():
            again = run(scenario, cache, device, scenario.depth)
        same_bits(result, again, "none ahead", f"{scenario.depth} ahead, {cache} rows{', rows late' if late else ''}")
    if scenario.rounded is not None:
        scenario = scenario.with_rounding()
        same_bits(run(scenario, small, device), run(scenario, deep, device, scenario.depth), "none ahead", "some")


def test_several_passes_that_are_clipped_by_one_norm(device: torch.device, pytestconfig: pytest.Config) -> None:
    drawn = scenarios(("train", "train", "train", "eval", "overlap", "abandon"), (1, 4)).map(Scenario.clipped)
    for_each_scenario(lambda scenario: check_clipped(scenario, device), drawn, pytestconfig, few=10, many=60)


def check_clipped(scenario: Scenario, device: torch.device) -> None:
    small = smallest_caches(scenario)
    deep = {name: (scenario.depth + 1) * rows for name, rows in small.items()}
    result = run(scenario, small, device)
    for cache, depth in ((deep, 0), (small, scenario.depth), (deep, scenario.depth)):
        again = run(scenario.varied(on_disk=not scenario.on_disk), cache, device, depth)
        same_bits(result, again, f"{small} rows, none ahead", f"{cache} rows, {depth} ahead")
    compare(scenario, result, device)
