"""Prefetching: the same training, and nothing left behind however it ends."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from jagged import apply, bag_config, bags_collection, jagged
from torchrec import KeyedJaggedTensor

import rec_sdk_torch as rst
from rec_sdk_torch.runtime.worker import Worker

IDS = 60
CACHE = 40


class Model(torch.nn.Module):
    """Two tables of different dims, and a dense layer."""

    def __init__(
        self,
        device: torch.device,
        cache: int = CACHE,
        optimizer: type = torch.optim.Adagrad,
        cache_policy: str = "lru",
        **options: Any,
    ) -> None:
        super().__init__()
        tables = [bag_config("t0", ("f0",)), bag_config("t1", ("f1",), embedding_dim=8)]
        self.sparse = bags_collection(device, *tables, cache=cache, cache_policy=cache_policy)
        apply(self.sparse, optimizer, lr=0.1, **options)
        torch.manual_seed(0)
        self.dense = torch.nn.Linear(
            sum(c.embedding_dim for c in self.sparse.embedding_bag_configs()), 1, device=device
        )

    def forward(self, batch: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.dense(self.sparse(batch).values()).squeeze(1)
        return (out**2).mean(), out


def make_batches(count: int, seed: int = 0, largest: int = IDS) -> list[KeyedJaggedTensor]:
    rng = np.random.default_rng(seed)
    return [
        jagged({f"f{f}": [rng.integers(0, largest, rng.integers(0, 4)).tolist() for _ in range(4)] for f in range(2)})
        for _ in range(count)
    ]


def step(model: Model, optimizer: torch.optim.Optimizer, batch: KeyedJaggedTensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss, out = model(batch)
    loss.backward()
    optimizer.step()
    return out.detach().cpu()


def train(model: Model, batches: Any) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.dense.parameters(), lr=0.1)
    return [step(model, optimizer, batch) for batch in batches]


def state(model: Model) -> dict[str, torch.Tensor]:
    return {name: value.cpu().clone() for name, value in model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


def at_rest(model: Model) -> bool:
    """Nothing is pinned or to come, and a batch as large as the cache has room."""
    groups = model.sparse.embedding.groups
    return not len(model.sparse.embedding.queue) and not any(group.engine.in_flight() for group in groups)


@pytest.mark.parametrize("depth", [0, 1, 2, 12])
def test_trains_the_same(device: torch.device, depth: int) -> None:
    batches = make_batches(30)
    plain, ahead = Model(device), Model(device)
    expected = train(plain, batches)
    given = []

    def watched() -> Iterator[KeyedJaggedTensor]:
        for batch in rst.prefetch(batches, ahead, depth):
            given.append(batch)
            yield batch

    outputs = train(ahead, watched())
    assert all(a is b for a, b in zip(given, batches, strict=True)), "the same objects in the same order"
    assert all(map(torch.equal, outputs, expected))
    assert same(state(ahead), state(plain))
    assert at_rest(ahead)


def test_plans_are_made_ahead(device: torch.device) -> None:
    """While a batch is trained the next are planned, and its forward plans nothing."""
    model = Model(device, cache=4 * IDS)
    train(model, make_batches(1))
    ahead = model.sparse.embedding.queue
    counts = []
    for place, batch in enumerate(rst.prefetch(make_batches(10, seed=1), model, depth=3)):
        model.sparse.wait_for_plans()
        before = model.sparse.cache_stats()["batches"]
        counts.append(before)
        out = model.sparse(batch).values()
        assert len(ahead) == min(3, 9 - place)
        model.sparse.wait_for_plans()
        assert model.sparse.cache_stats()["batches"] == before, "its plan was there"
        out.sum().backward()
    groups = len(model.sparse.embedding.groups)
    assert counts == [groups * (1 + min(10, place + 4)) for place in range(10)]


@pytest.mark.parametrize("moved", [False, True], ids=["batch on the host", "batch on the device"])
def test_pipeline(device: torch.device, moved: bool) -> None:
    batches = make_batches(20)
    plain, ahead = Model(device), Model(device)
    expected = train(plain, batches)
    optimizer = torch.optim.SGD(ahead.dense.parameters(), lr=0.1)
    pipeline = rst.EmbCacheTrainPipelineSparseDist(ahead, optimizer, torch.device("cpu"), device, return_loss=True)
    source = iter(batches if not moved else [batch.to(device) for batch in batches])
    outputs = [pipeline.progress(source) for _ in batches]
    with pytest.raises(StopIteration):
        pipeline.progress(source)
    assert all(torch.equal(out.detach().cpu(), e) for (out, _), e in zip(outputs, expected, strict=True))
    assert all(torch.equal((out**2).mean(), loss) for out, loss in outputs)
    assert same(state(ahead), state(plain))
    assert at_rest(ahead)
    if not moved:
        assert ahead.sparse.cache_stats()["copied_batches"] == 0, "ids that are on the host are not copied back"
    again = iter(batches)
    pipeline.progress(again)
    train(plain, batches[:1])
    assert same(state(ahead), state(plain)), "a save while batches are planned ahead"


def test_pipeline_options(device: torch.device) -> None:
    model = Model(device)
    optimizer = torch.optim.SGD(model.dense.parameters(), lr=0.1)
    cpu = torch.device("cpu")
    calls: list[str] = []

    def forward(batch: KeyedJaggedTensor) -> tuple[torch.Tensor, str]:
        calls.append("forward")
        return model(batch)[0].reshape(1), "output"

    def backward(losses: torch.Tensor) -> None:
        calls.append("backward")
        losses.sum().backward()

    pipeline = rst.EmbCacheTrainPipelineSparseDist(
        model,
        optimizer,
        cpu,
        device,
        custom_model_fwd=forward,
        custom_model_zero_grad=lambda: calls.append("zero_grad"),
        custom_model_bwd=backward,
        execute_all_batches=False,
        depth=2,
    )
    source = iter(make_batches(5))
    assert [pipeline.progress(source) for _ in range(3)] == ["output"] * 3
    with pytest.raises(StopIteration):  # two were read ahead when the data ended
        pipeline.progress(source)
    assert calls == ["zero_grad", "forward", "backward"] * 3
    assert at_rest(model)
    model.eval()
    before = state(model)
    pipeline.progress(iter(make_batches(3, seed=5, largest=10**6)))
    assert same(state(model), before), "in evaluation nothing is trained"
    pipeline.reset()
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"evict_step_interval": 0}, ValueError, "evict_step_interval is 0, must be 1"),
        ({"apply_jit": True}, ValueError, "apply_jit"),
        ({"depth": 13}, ValueError, "0 to 12"),
        ({"context_type": object}, ValueError, "context_type"),
    ]
    for options, error, message in wrong:
        with pytest.raises(error, match=message):
            rst.EmbCacheTrainPipelineSparseDist(model, optimizer, cpu, device, **options)
    with pytest.raises(ValueError, match="cpu_device"):
        rst.EmbCacheTrainPipelineSparseDist(model, optimizer, "meta", device)
    with pytest.raises(ValueError, match="no EmbCache"):
        rst.EmbCacheTrainPipelineSparseDist(model.dense, optimizer, cpu, device)


Disturbance = Callable[[Model, KeyedJaggedTensor], None]


def skip_backward(model: Model, batch: KeyedJaggedTensor) -> None:
    model(batch)


def skip(model: Model, batch: KeyedJaggedTensor) -> None:
    pass


def evaluate(model: Model, batch: KeyedJaggedTensor) -> None:
    model.eval()
    model(batch)
    model(make_batches(1, seed=9, largest=10**6)[0])
    model.train()


def save(model: Model, batch: KeyedJaggedTensor) -> None:
    model.sparse.load_state_dict(model.sparse.state_dict())


def another_batch(model: Model, batch: KeyedJaggedTensor) -> None:
    model(make_batches(1, seed=9)[0])[0].backward()


def changed_ids(model: Model, batch: KeyedJaggedTensor) -> None:
    batch.values().add_(1)
    model(batch)[0].backward()


@pytest.fixture
def what_was_before_stays() -> Iterator[None]:
    """For the garbage collector, which else looks at all that torch has every time: a quarter of a second."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("disturb", [skip_backward, skip, evaluate, save, another_batch, changed_ids])
def test_disturbed(device: torch.device, disturb: Disturbance, what_was_before_stays: None) -> None:
    """Other things that happen between two steps happen as without prefetching."""
    results = []
    for depth in (0, 2):
        model = Model(device)
        optimizer = torch.optim.SGD(model.dense.parameters(), lr=0.1)
        outputs, saved = [], []
        for place, batch in enumerate(rst.prefetch(make_batches(16), model, depth)):
            if place % 4 == 2:
                disturb(model, batch)
                gc.collect()
                saved.append(state(model))
            else:
                outputs.append(step(model, optimizer, batch))
        assert at_rest(model)
        results.append((outputs, [*saved, state(model)]))
    (outputs, states), (others, other_states) = results
    assert all(map(torch.equal, outputs, others))
    assert all(map(same, states, other_states))


class BrokenError(Exception):
    pass


@pytest.mark.parametrize("kind", ["break", "exception in the model", "interrupt", "collected"])
def test_an_iterator_left_half_way(device: torch.device, kind: str) -> None:
    model = Model(device)
    train(model, make_batches(3))
    before = state(model)
    threads = threading.active_count()
    errors = {"exception in the model": BrokenError, "interrupt": KeyboardInterrupt}
    batches = rst.prefetch(make_batches(8, seed=1, largest=10**6), model, 3)
    try:
        for _ in batches:
            model.sparse.wait_for_plans()
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
    assert at_rest(model)
    assert same(state(model), before)
    assert threading.active_count() <= threads + 1


def test_what_the_data_raises_comes_in_its_place(device: torch.device) -> None:
    def data() -> Iterator[KeyedJaggedTensor]:
        yield from make_batches(4)
        raise BrokenError

    model = Model(device)
    given = []
    with pytest.raises(BrokenError):
        train(model, (given.append(batch) or batch for batch in rst.prefetch(data(), model, 2)))
    assert len(given) == 4
    assert at_rest(model)


def test_a_bad_batch_raises_in_its_forward(device: torch.device) -> None:
    batches = make_batches(5)
    batches[3] = jagged({"f0": [list(range(CACHE + 1))], "f1": [[1]]})
    model, trained = Model(device), 0
    optimizer = torch.optim.SGD(model.dense.parameters(), lr=0.1)
    for batch in rst.prefetch(batches, model, 4):
        if trained == 3:
            with pytest.raises(rst.CacheTooSmallError):
                model(batch)
        else:
            step(model, optimizer, batch)
        trained += 1
    assert trained == 5
    assert at_rest(model)


def test_a_cache_for_one_batch_runs_shallower(device: torch.device) -> None:
    batches = [jagged({"f0": [list(range(k, k + 6))], "f1": [list(range(k, k + 6))]}) for k in range(0, 60, 6)]
    plain, ahead = Model(device, cache=6), Model(device, cache=6)
    expected = train(plain, batches)
    with pytest.warns(UserWarning, match="less far ahead") as caught:
        outputs = train(ahead, (wait(ahead, batch) for batch in rst.prefetch(batches, ahead, 2)))
    assert len([w for w in caught if "less far" in str(w.message)]) == 1
    assert all(map(torch.equal, outputs, expected))
    assert same(state(ahead), state(plain))
    assert at_rest(ahead)


def wait(model: Model, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    model.sparse.wait_for_plans()
    return batch


def test_many_short_epochs(device: torch.device, request: pytest.FixtureRequest) -> None:
    """With a cache one row larger than a batch needs."""
    epochs = 60 if device.type != "cpu" else 1000 if request.config.getoption("--full") else 200
    plain, ahead = Model(device, cache=9), Model(device, cache=9)
    for epoch in range(epochs):
        rng = np.random.default_rng(epoch)
        batches = [
            jagged({f: [rng.choice(IDS, 8, replace=False).tolist()] for f in ("f0", "f1")}) for _ in range(epoch % 4)
        ]
        expected = train(plain, batches)
        assert all(map(torch.equal, train(ahead, rst.prefetch(batches, ahead, epoch % 5)), expected))
    assert same(state(ahead), state(plain))
    assert at_rest(ahead)


@dataclass
class Sample:
    ids: KeyedJaggedTensor
    label: torch.Tensor


def test_where_the_features_are(device: torch.device) -> None:
    model = Model(device)
    train(model, make_batches(1))
    kjts = make_batches(3)
    for batch in (Sample(kjts[0], torch.ones(1)), {"a": 1, "ids": kjts[0]}, (kjts[0], torch.ones(1)), kjts[0]):
        assert list(rst.prefetch([batch], model)) == [batch]
    with pytest.raises(TypeError, match="no KeyedJaggedTensor: say which"):
        next(rst.prefetch([torch.ones(1)], model))
    with pytest.raises(TypeError, match=r"several KeyedJaggedTensors \(\['0', '1'\]\)"):
        next(rst.prefetch([(kjts[0], kjts[1])], model))
    assert next(rst.prefetch([(kjts[0], kjts[1])], model, features=lambda pair: pair[1])) == (kjts[0], kjts[1])
    assert next(rst.prefetch(kjts, model, features=lambda kjt: {"sparse": kjt})) is kjts[0]
    with pytest.raises(ValueError, match=r"names collections \['other'\]"):
        next(rst.prefetch(kjts, model, features=lambda kjt: {"other": kjt}))
    with pytest.raises(TypeError, match="expected a KeyedJaggedTensor"):
        next(rst.prefetch(kjts, model, features=lambda kjt: kjt.values()))
    with pytest.raises(ValueError, match="lacks features"):
        next(rst.prefetch([jagged({"f0": [[1]]})], model))
    with pytest.raises(ValueError, match="depth is -1"):
        rst.prefetch(kjts, model, depth=-1)
    with pytest.raises(TypeError):
        rst.prefetch(kjts, model, depth=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Linear has no EmbCache"):
        rst.prefetch(kjts, model.dense)
    with pytest.raises(TypeError, match=r"the model is None, expected a torch\.nn\.Module"):
        rst.prefetch(kjts, None)  # type: ignore[arg-type]
    assert at_rest(model)


def test_many_batches_skipped(device: torch.device) -> None:
    model = Model(device)
    train(model, make_batches(1))
    before = state(model)
    assert len(list(rst.prefetch(make_batches(40), model, 12))) == 40
    assert at_rest(model)
    assert same(state(model), before)


def test_too_many_prefetched(device: torch.device) -> None:
    model = Model(device)
    train(model, make_batches(1))
    batches = make_batches(17)
    for batch in batches[:16]:
        model.sparse.prefetch(batch)
    with pytest.raises(RuntimeError, match="16 batches were prefetched"):
        model.sparse.prefetch(batches[16])
    plain = Model(device)
    train(plain, make_batches(1))
    assert all(map(torch.equal, train(model, batches), train(plain, batches)))


def test_windows(device: torch.device) -> None:
    options = {"optimizer": rst.AccumulateAdagrad, "use_accumulate": True, "accumulate_step": 3}
    plain, ahead = Model(device, **options), Model(device, **options)
    batches = make_batches(20)
    expected = train(plain, batches)
    assert all(map(torch.equal, train(ahead, rst.prefetch(batches, ahead, 3)), expected))
    assert at_rest(ahead)


def test_a_policy_that_looks_ahead_misses_less(device: torch.device) -> None:
    batches = make_batches(60)
    misses = {}
    for depth in (0, 10):
        model = Model(device, cache=16, cache_policy="look_ahead")
        outputs = train(model, (wait(model, batch) for batch in rst.prefetch(batches, model, depth)))
        misses[depth] = model.sparse.cache_stats()["unique_misses"], outputs
        assert at_rest(model)
    assert all(map(torch.equal, misses[0][1], misses[10][1]))
    assert misses[10][0] < 0.9 * misses[0][0]


def test_a_prefetched_batch_that_is_only_read(device: torch.device) -> None:
    model = Model(device)
    train(model, make_batches(1))
    first, second = make_batches(2)
    model.sparse.prefetch(first)
    model.sparse.prefetch(second)
    model.eval()
    model(second)
    assert at_rest(model), "it has come, and none before it will"


class Owner:
    """Holds a worker, whose job is one of its methods."""

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
