"""Training with prefetching gives the same results, and leaves no plan or pin behind, however it ends."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from batches import jagged, random_bags
from collection_factory import Model, apply, bag_config
from torchrec import KeyedJaggedTensor
from training import differing_tensors

import rec_sdk_torch as rst
from rec_sdk_torch.runtime.worker import Worker

IDS = 60
CACHE = 40


class Net(Model):
    """A model with two tables of different dims, and a dense layer."""

    def __init__(self, device: torch.device, cache: int = CACHE, window: int = 1, cache_policy: str = "lru") -> None:
        configs = [bag_config(), bag_config("t1", ["f1"], embedding_dim=8)]
        super().__init__(device, *configs, optimizer=None, cache=cache, cache_policy=cache_policy)
        apply(self.tables, torch.optim.Adagrad, lr=0.1, window=window)

    def forward(self, batch: KeyedJaggedTensor) -> Any:
        out = super().forward(batch).squeeze(1)
        return (out**2).mean(), out


def make_batches(count: int, seed: int = 0, largest: int = IDS) -> list[KeyedJaggedTensor]:
    rng = np.random.default_rng(seed)
    return [jagged(random_bags(rng, ["f0", "f1"], largest, batch_size=4, longest=3)) for _ in range(count)]


def step(model: Net, optimizer: torch.optim.Optimizer, batch: KeyedJaggedTensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss, out = model(batch)
    loss.backward()
    optimizer.step()
    return out.detach().cpu()


def train(model: Any, batches: Any) -> list[torch.Tensor]:
    optimizer = sgd(model)
    return [step(model, optimizer, batch) for batch in batches]


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.cpu().clone() for name, value in model.state_dict().items()}


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.dense.parameters(), lr=0.1)


def pipeline_of(model: Any, device: torch.device, **options: Any) -> Any:
    return rst.EmbCacheTrainPipelineSparseDist(model, sgd(model), torch.device("cpu"), device, **options)


def is_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return not list(differing_tensors(one, other))


def is_idle(model: Net) -> bool:
    """Returns whether nothing is pinned or prefetched."""
    groups = model.tables.embedding.groups
    return not len(model.tables.embedding.queue) and not any(group.engine.in_flight() for group in groups)


def assert_trained_the_same(ahead: Net, plain: Net, outputs: Any = (), expected: Any = ()) -> None:
    """Checks that both models were trained to the same values, and that no plan remains."""
    assert len(outputs) == len(expected)
    assert all(map(torch.equal, outputs, expected))
    assert is_same(state(ahead), state(plain))
    assert is_idle(ahead)


@pytest.mark.parametrize("depth", [0, 1, 3, 12])
@pytest.mark.parametrize("window", [1, 3])
def test_trains_the_same(device: torch.device, depth: int, window: int) -> None:
    batches = make_batches(30)
    plain, ahead = Net(device, window=window), Net(device, window=window)
    given: list[KeyedJaggedTensor] = []
    outputs = train(ahead, (given.append(batch) or batch for batch in rst.prefetch(batches, ahead, depth)))
    assert all(a is b for a, b in zip(given, batches, strict=True)), "the same objects in the same order"
    assert_trained_the_same(ahead, plain, outputs, train(plain, batches))


def test_the_end_of_a_window_is_predicted(device: torch.device) -> None:
    """The update at the end of a window acquires the planning lock; other backward passes do not."""
    model, ends = Net(device, window=3), []
    for batch in make_batches(6):
        ends.append(model.tables.embedding.layout.ends_window())
        train(model, [batch])
    assert ends == [False, False, True] * 2


def test_plans_are_made_ahead(device: torch.device) -> None:
    """While a batch is trained, the next batches are planned, so their forward passes plan nothing."""
    model = Net(device, cache=4 * IDS)
    train(model, make_batches(1))
    ahead = model.tables.embedding.queue
    counts = []
    for place, batch in enumerate(rst.prefetch(make_batches(10, seed=1), model, depth=3)):
        model.tables.wait_for_plans()
        before = model.tables.cache_stats()["batches"]
        counts.append(before)
        out = model.tables(batch).values()
        assert len(ahead) == min(3, 9 - place)
        model.tables.wait_for_plans()
        assert model.tables.cache_stats()["batches"] == before, "its plan was there"
        out.sum().backward()
    groups = len(model.tables.embedding.groups)
    assert counts == [groups * (1 + min(10, place + 4)) for place in range(10)]


@pytest.mark.parametrize("moved", [False, True], ids=["batch on the host", "batch on the device"])
def test_pipeline(device: torch.device, moved: bool) -> None:
    batches = make_batches(20)
    plain, ahead = Net(device), Net(device)
    pipeline = pipeline_of(ahead, device, return_loss=True)
    source = iter(batches if not moved else [batch.to(device) for batch in batches])
    outputs = [pipeline.progress(source) for _ in batches]
    with pytest.raises(StopIteration):
        pipeline.progress(source)
    assert all(torch.equal((out**2).mean(), loss) for out, loss in outputs)
    assert_trained_the_same(ahead, plain, [out.detach().cpu() for out, _ in outputs], train(plain, batches))
    if not moved:
        assert ahead.tables.cache_stats()["copied_batches"] == 0, "ids that are on the host are not copied back"
    pipeline.progress(iter(batches))
    train(plain, batches[:1])
    assert is_same(state(ahead), state(plain)), "a save while batches are planned ahead"


def test_pipeline_options(device: torch.device) -> None:
    model = Net(device)
    calls: list[str] = []

    def forward(batch: KeyedJaggedTensor) -> tuple[torch.Tensor, str]:
        calls.append("forward")
        return model(batch)[0].reshape(1), "output"

    def backward(losses: torch.Tensor) -> None:
        calls.append("backward")
        losses.sum().backward()

    hooks = {"custom_model_fwd": forward, "custom_model_bwd": backward}
    hooks["custom_model_zero_grad"] = lambda: calls.append("zero_grad")
    pipeline = pipeline_of(model, device, **hooks, execute_all_batches=False, depth=2)
    source = iter(make_batches(5))
    assert [pipeline.progress(source) for _ in range(3)] == ["output"] * 3
    with pytest.raises(StopIteration):  # two batches had been read ahead when the data ended
        pipeline.progress(source)
    assert calls == ["zero_grad", "forward", "backward"] * 3
    assert is_idle(model)
    model.eval()
    before = state(model)
    pipeline.progress(iter(make_batches(3, seed=5, largest=10**6)))
    assert is_same(state(model), before), "in evaluation nothing is trained"
    pipeline.reset()
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"evict_step_interval": 0}, ValueError, "evict_step_interval is 0, must be 1"),
        ({"apply_jit": True}, ValueError, "apply_jit"),
        ({"depth": 13}, ValueError, "0 to 12"),
        ({"context_type": object}, ValueError, "context_type"),
    ]
    for options, error, message in wrong:
        with pytest.raises(error, match=message):
            pipeline_of(model, device, **options)
    with pytest.raises(ValueError, match="cpu_device"):
        rst.EmbCacheTrainPipelineSparseDist(model, sgd(model), "meta", device)
    with pytest.raises(ValueError, match="no EmbCache"):
        rst.EmbCacheTrainPipelineSparseDist(model.dense, sgd(model), "cpu", device)


def evaluate(model: Net, batch: KeyedJaggedTensor) -> None:
    model.eval()
    model(batch)
    model(make_batches(1, seed=9, largest=10**6)[0])
    model.train()


def changed_ids(model: Net, batch: KeyedJaggedTensor) -> None:
    batch.values().add_(1)
    model(batch)[0].backward()


DISTURBANCES: dict[str, Callable[[Net, KeyedJaggedTensor], object]] = {
    "skip the backward": lambda model, batch: model(batch),
    "skip": lambda model, batch: None,
    "evaluate": evaluate,
    "save": lambda model, batch: model.tables.load_state_dict(model.tables.state_dict()),
    "another batch": lambda model, batch: model(make_batches(1, seed=9)[0])[0].backward(),
    "changed ids": changed_ids,
}


@pytest.fixture
def freeze_existing_objects() -> Iterator[None]:
    """Freezes existing objects; otherwise each garbage collection would traverse torch's objects for 0.25 seconds."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("freeze_existing_objects")
@pytest.mark.parametrize("disturb", DISTURBANCES)
def test_operations_between_prefetched_steps(device: torch.device, disturb: str) -> None:
    """Operations between two steps have the same effect as without prefetching."""
    results = []
    for depth in (0, 2):
        model = Net(device)
        optimizer, outputs, saved = sgd(model), [], []
        for place, batch in enumerate(rst.prefetch(make_batches(16), model, depth)):
            if place % 4 == 2:
                DISTURBANCES[disturb](model, batch)
                gc.collect()
                saved.append(state(model))
            else:
                outputs.append(step(model, optimizer, batch))
        assert is_idle(model)
        results.append((outputs, [*saved, state(model)]))
    (outputs, states), (others, other_states) = results
    assert all(map(torch.equal, outputs, others))
    assert all(map(is_same, states, other_states))


class BrokenError(Exception):
    pass


@pytest.mark.usefixtures("freeze_existing_objects")
@pytest.mark.parametrize("kind", ["break", "exception in the model", "interrupt", "collected"])
def test_an_iterator_abandoned_half_way(device: torch.device, kind: str) -> None:
    model = Net(device)
    train(model, make_batches(3))
    before = state(model)
    threads = threading.active_count()
    errors = {"exception in the model": BrokenError, "interrupt": KeyboardInterrupt}
    batches = rst.prefetch(make_batches(8, seed=1, largest=10**6), model, 3)
    try:
        for _ in batches:
            model.tables.wait_for_plans()
            if kind in errors:
                raise errors[kind]
            break
    except (BrokenError, KeyboardInterrupt):
        pass
    del batches
    if kind == "collected":
        cycle = [rst.prefetch(make_batches(8, seed=1, largest=10**6), model, 3)]
        next(cycle[0])
        cycle.append(cycle)  # type: ignore[arg-type]
        del cycle
    gc.collect()
    assert is_idle(model)
    assert is_same(state(model), before)
    assert threading.active_count() <= threads + 1


def test_an_error_of_the_data_is_raised_at_its_batch(device: torch.device) -> None:
    def data() -> Iterator[KeyedJaggedTensor]:
        yield from make_batches(4)
        raise BrokenError

    model = Net(device)
    given = []
    with pytest.raises(BrokenError):
        train(model, (given.append(batch) or batch for batch in rst.prefetch(data(), model, 2)))
    assert len(given) == 4
    assert is_idle(model)


def test_a_bad_batch_raises_in_its_forward(device: torch.device) -> None:
    batches = make_batches(5)
    batches[3] = jagged({"f0": [list(range(CACHE + 1))], "f1": [[1]]})
    model = Net(device)
    for place, batch in enumerate(rst.prefetch(batches, model, 4)):
        if place == 3:
            with pytest.raises(rst.CacheTooSmallError):
                model(batch)
        else:
            train(model, [batch])
    assert place == 4
    assert is_idle(model)


def test_a_cache_for_one_batch_runs_shallower(device: torch.device) -> None:
    batches = [jagged({"f0": [list(range(k, k + 6))], "f1": [list(range(k, k + 6))]}) for k in range(0, 60, 6)]
    plain, ahead = Net(device, cache=6), Net(device, cache=6)
    with pytest.warns(UserWarning, match="fewer are planned ahead") as caught:
        outputs = train(ahead, (wait(ahead, batch) for batch in rst.prefetch(batches, ahead, 2)))
    assert len([w for w in caught if "fewer are planned" in str(w.message)]) == 1
    assert_trained_the_same(ahead, plain, outputs, train(plain, batches))


def wait(model: Net, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    model.tables.wait_for_plans()
    return batch


def test_many_short_epochs(device: torch.device, request: pytest.FixtureRequest) -> None:
    """The cache has only one row more than a batch needs."""
    epochs = 60 if device.type != "cpu" else 1000 if request.config.getoption("--full") else 120
    plain, ahead = Net(device, cache=9), Net(device, cache=9)
    for epoch in range(epochs):
        rng = np.random.default_rng(epoch)
        batches = [
            jagged({f: [rng.choice(IDS, 8, replace=False).tolist()] for f in ("f0", "f1")}) for _ in range(epoch % 4)
        ]
        expected = train(plain, batches)
        assert all(map(torch.equal, train(ahead, rst.prefetch(batches, ahead, epoch % 5)), expected))
    assert_trained_the_same(ahead, plain)


def test_a_batch_that_runs_while_it_is_about_to_be_planned(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its forward runs after the planning thread has chosen the batch, and before the thread plans it."""
    model = Net(device)
    train(model, make_batches(1))
    queue = model.tables.embedding.queue
    chosen, trained, plan_ahead = threading.Event(), threading.Event(), queue._plan_ahead

    def plan_late(prefetched: Any) -> Any:
        chosen.set()
        assert trained.wait(60)
        return plan_ahead(prefetched)

    monkeypatch.setattr(queue, "_plan_ahead", plan_late)
    (batch,) = make_batches(1, seed=1)
    prefetched = model.tables.prefetch(batch)
    assert chosen.wait(60)
    train(model, [batch])
    trained.set()
    queue._worker.wait()
    assert prefetched.plans is None
    assert is_idle(model)


@dataclass
class Sample:
    ids: KeyedJaggedTensor
    label: torch.Tensor


def test_features_are_found_in_samples(device: torch.device) -> None:
    model = Net(device)
    train(model, make_batches(1))
    kjts = make_batches(3)
    for batch in (Sample(kjts[0], torch.ones(1)), {"a": 1, "ids": kjts[0]}, (kjts[0], torch.ones(1)), kjts[0]):
        assert list(rst.prefetch([batch], model)) == [batch]
    assert next(rst.prefetch([(kjts[0], kjts[1])], model, features=lambda pair: pair[1])) == (kjts[0], kjts[1])
    assert next(rst.prefetch(kjts, model, features=lambda kjt: {"tables": kjt})) is kjts[0]
    wrong: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        ([torch.ones(1)], {}, TypeError, "no KeyedJaggedTensor: say which"),
        ([(kjts[0], kjts[1])], {}, TypeError, r"several KeyedJaggedTensors \(\['0', '1'\]\)"),
        (kjts, {"features": lambda kjt: {"other": kjt}}, ValueError, r"names collections \['other'\]"),
        (kjts, {"features": lambda kjt: kjt.values()}, TypeError, "expected a KeyedJaggedTensor"),
        ([jagged({"f0": [[1]]})], {}, ValueError, "lacks features"),
        (kjts, {"depth": -1}, ValueError, "depth is -1"),
        (kjts, {"depth": 1.5}, TypeError, "depth"),
        (kjts, {"model": model.dense}, ValueError, "Linear has no EmbCache"),
        (kjts, {"model": None}, TypeError, r"the model is None, expected a torch\.nn\.Module"),
    ]
    for given, options, error, message in wrong:
        with pytest.raises(error, match=message):
            next(rst.prefetch(given, options.pop("model", model), **options))
    assert is_idle(model)


def test_skipping_many_prefetched_batches(device: torch.device) -> None:
    model = Net(device)
    train(model, make_batches(1))
    before = state(model)
    assert len(list(rst.prefetch(make_batches(40), model, 12))) == 40
    assert is_idle(model)
    assert is_same(state(model), before)


def test_too_many_prefetched(device: torch.device) -> None:
    plain, model = Net(device), Net(device)
    train(model, make_batches(1))
    batches = make_batches(17)
    for batch in batches[:16]:
        model.tables.prefetch(batch)
    with pytest.raises(RuntimeError, match="16 batches are prefetched"):
        model.tables.prefetch(batches[16])
    train(plain, make_batches(1))
    assert all(map(torch.equal, train(model, batches), train(plain, batches)))


def test_a_policy_that_looks_ahead_misses_less(device: torch.device) -> None:
    batches = make_batches(60)
    misses = {}
    for depth in (0, 10):
        model = Net(device, cache=16, cache_policy="look_ahead")
        outputs = train(model, (wait(model, batch) for batch in rst.prefetch(batches, model, depth)))
        misses[depth] = model.tables.cache_stats()["unique_misses"], outputs
        assert is_idle(model)
    assert all(map(torch.equal, misses[0][1], misses[10][1]))
    assert misses[10][0] < 0.9 * misses[0][0]


def test_a_prefetched_batch_that_is_only_read(device: torch.device) -> None:
    model = Net(device)
    train(model, make_batches(1))
    first, second = make_batches(2)
    model.tables.prefetch(first)
    model.tables.prefetch(second)
    model.eval()
    model(second)
    assert is_idle(model), "it has come, and none before it will"


class Owner:
    """An object that owns a worker, whose job is a method of the object."""

    def __init__(self) -> None:
        self.worker = Worker("owned")
        self.worker.run(self.job)

    def job(self) -> None:
        pass


def test_a_worker_ends_with_the_owner_of_its_last_job() -> None:
    owner = Owner()
    (thread,) = owner.worker._threads
    del owner
    thread.join(10)
    assert not thread.is_alive()
