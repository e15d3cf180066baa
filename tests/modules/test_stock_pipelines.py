"""TorchRec's train pipelines and DistributedModelParallel, and torch's DistributedDataParallel, with unsharded tables.

Results must be bit-identical to a plain loop over the same batches.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from batches import jagged
from collection_factory import EACH_KIND, POOLED, Kind, apply, capacity_collection, index_bag_config
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import train_pipelines as pipelines
from torchrec.streamable import Pipelineable
from training import differing_tensors, state_of
from two_ranks import BACKENDS, run_ranks

from rec_sdk_torch import prefetch
from rec_sdk_torch.modules import data_parallel


@dataclass
class Sample(Pipelineable):
    ids: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Sample:
        return Sample(self.ids.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: Any) -> None:
        if self.ids.values().device.type != "cpu":
            self.ids.record_stream(stream)


class Model(torch.nn.Module):
    def __init__(self, device: torch.device | None, kind: Kind = POOLED, cache: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pooled = kind is POOLED
        self.tables = apply(kind.collection(device, cache=cache), torch.optim.Adagrad)
        self.dense = torch.nn.Linear(4, 1, device=device)

    def rows(self, batch: Sample) -> torch.Tensor:
        output = self.tables(batch.ids)
        return (output if self.pooled else output["f0"]).values()

    def forward(self, batch: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.dense(self.rows(batch))
        return output.square().sum(), output.detach()


BATCHES = [Sample(jagged({"f0": [[i, i + 1], [i + 2], []]})) for i in (0, 1, 0, 5, 9, 2, 0)]


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(getattr(model, "module", model).dense.parameters(), lr=0.1)


def loop(model: Any) -> list[torch.Tensor]:
    optimizer, outputs = optimizer_of(model), []
    for batch in BATCHES:
        optimizer.zero_grad()
        loss, output = model(batch)
        loss.backward()
        optimizer.step()
        outputs.append(output)
    return outputs


def through(pipeline: Any, batches: Any = BATCHES) -> list[torch.Tensor]:
    outputs, batches = [], iter(batches)
    while True:
        try:
            outputs.append(pipeline.progress(batches))
        except StopIteration:
            return outputs


def waited(batches: Iterator[Sample], model: Model) -> Iterator[Sample]:
    for batch in batches:
        model.tables.wait_for_plans()
        yield batch


def pipelined(pipeline: Any, model: Any, device: torch.device) -> Any:
    """Builds `pipeline` for `model`.

    A pipeline that compiles the model uses the eager backend, since not every device supports Inductor.
    """
    compiles = pipeline is pipelines.TrainPipelinePT2
    options = {"compile_configs": pipelines.TorchCompileConfig(backend="eager")} if compiles else {}
    return pipeline(model, optimizer_of(model), device, **options)


def model_parallel(model: torch.nn.Module, device: torch.device, **options: Any) -> DistributedModelParallel:
    """Wraps the model in DistributedModelParallel with TorchRec's own plan, which shards no table."""
    return DistributedModelParallel(model, device=device, **options)


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.fixture
def alone(device: torch.device) -> Iterator[None]:
    """Creates a process group of one rank."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"tcp://localhost:{free.getsockname()[1]}"
    torch.distributed.init_process_group(BACKENDS[device.type], init_method=address, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


TRAINING = [
    pipelines.TrainPipelineBase,
    pipelines.TrainPipelinePT2,
    pipelines.TrainPipelineSparseDist,
    pipelines.TrainPipelineSparseDistLite,
    pipelines.TrainPipelineFusedSparseDist,
    pipelines.TrainPipelineSemiSync,
    pipelines.PrefetchTrainPipelineSparseDist,
]


@pytest.mark.parametrize("pipeline", TRAINING)
def test_a_stock_pipeline_of_prefetched_batches(device: torch.device, alone: None, pipeline: Any) -> None:
    """Batches that the pipeline has read are planned before they are trained; results stay bit-identical."""
    plain, model = Model(device, cache=40), Model(device, cache=40)
    model.tables(BATCHES[0].ids)  # the first forward must precede any planning ahead
    ahead = model.tables.embedding.queue
    in_threads: list[bool] = []

    def plan(*arguments: Any) -> Any:
        in_threads.append(threading.current_thread() is not threading.main_thread())
        return type(ahead)._plan(ahead, *arguments)

    with mock.patch.object(ahead, "_plan", plan):
        batches = waited(prefetch(BATCHES, model, depth=2, features=lambda batch: batch.ids), model)
        found = through(pipelined(pipeline, model, device), batches)
    assert_same(found, loop(plain))
    assert sum(in_threads) > len(BATCHES) / 2, "most were planned in the other thread"


@pytest.mark.parametrize("pipeline", TRAINING)
@EACH_KIND
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_stock_pipeline_trains_the_same(
    device: torch.device, alone: None, kind: Kind, pipeline: Any, wrapped: bool
) -> None:
    plain, model = Model(device, kind), Model(device, kind)
    whole = model_parallel(model, device) if wrapped else model
    assert_same(through(pipelined(pipeline, whole, device)), loop(plain))
    assert not list(differing_tensors(model.state_dict(), plain.state_dict()))
    assert not list(differing_tensors(state_of(model.tables), state_of(plain.tables)))


@pytest.mark.parametrize("pipeline", [pipelines.EvalPipelineSparseDist, pipelines.EvalPipelineFusedSparseDist])
def test_a_stock_pipeline_evaluates(device: torch.device, alone: None, pipeline: Any) -> None:
    model = Model(device)
    loop(model)
    model.eval()
    before = model.state_dict()
    expected = [model(batch)[1] for batch in BATCHES]
    assert_same(through(pipeline(model, optimizer_of(model), device)), expected)
    assert not list(differing_tensors(model.state_dict(), before))


@pytest.mark.parametrize("sharders", [None, [], [EmbeddingBagCollectionSharder()]])
@pytest.mark.parametrize("made_on", ["device", "meta", "default meta"])
def test_model_parallel_leaves_tables_to_each_rank(
    device: torch.device, alone: None, sharders: Any, made_on: str
) -> None:
    """This includes models on the meta device, for which no memory was allocated."""
    plain = Model(device)
    with torch.device("meta" if made_on == "default meta" else device):
        model = Model({"device": device, "meta": torch.device("meta")}.get(made_on))
    assert model.tables.device.type == ("meta" if "meta" in made_on else device.type)
    parallel = model_parallel(model, device, sharders=sharders)
    if "meta" in made_on:
        parallel.load_state_dict(plain.state_dict())
    assert parallel.module.tables.device == device
    assert [p.device.type for p in parallel.parameters()] == [device.type] * 3
    assert parallel.plan.plan == {}
    assert_same(loop(parallel), loop(plain))
    assert not list(differing_tensors(parallel.state_dict(), plain.state_dict()))
    states, expected = (list(m.fused_optimizer.state_dict()["state"].values()) for m in (parallel, plain.tables))
    assert states != []
    assert not [name for one, other in zip(states, expected, strict=True) for name in differing_tensors(one, other)]
    parallel.fused_optimizer.param_groups[0]["lr"] = 0.0
    before = model.tables.state_dict()
    loop(parallel)
    assert not list(differing_tensors(model.tables.state_dict(), before))


def test_model_parallel_does_not_drop_what_cannot_be_loaded(device: torch.device, alone: None) -> None:
    parallel = model_parallel(Model(device), device, sharders=[])
    loop(parallel)
    before = parallel.state_dict()
    (key,) = [key for key in before if key.endswith("t0.weight")]
    for state in ({**before, key: before[key][:, :-1]}, {name: before[name] for name in before if name != key}):
        with pytest.raises(RuntimeError, match=r"t0\.weight"):
            parallel.load_state_dict(state)
        assert not list(differing_tensors(parallel.state_dict(), before))


class Both(Model):
    """A model with a collection of this package and one that TorchRec shards."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        config = index_bag_config("own", num_embeddings=20)
        self.sharded = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
        _apply_optimizer_in_backward(torch.optim.SGD, self.sharded.parameters(), {"lr": 0.1})

    def rows(self, batch: Sample) -> torch.Tensor:
        return super().rows(batch) + self.sharded(batch.ids).values()


def test_tables_beside_a_collection_that_torchrec_shards(device: torch.device, alone: None) -> None:
    if device.type == "npu":
        pytest.skip("TorchRec has no kernels of its own for NPUs")
    plain, model = (DistributedModelParallel(Both(device), device=device) for _ in range(2))
    assert list(model.plan.plan) == ["sharded"]
    plain.load_state_dict(model.state_dict())
    expected = loop(plain)
    assert_same(through(pipelines.TrainPipelineSparseDist(model, optimizer_of(model), device)), expected)


def average_of_ranks(model: Model) -> None:
    own = model.dense.weight.grad.flatten()
    gradients = [torch.empty_like(own) for _ in range(2)]
    torch.distributed.all_gather(gradients, own)
    first, second = (gradient.cpu() for gradient in gradients)
    assert torch.equal(first, second), "dense gradients are averaged"
    assert first.any()


def run_rank(rank: int, device: torch.device) -> None:
    """Runs one of two ranks, each with its own batches and its own tables."""
    for wrap, options in (
        (model_parallel, {}),
        (DistributedDataParallel, {"find_unused_parameters": False}),
        (DistributedDataParallel, {"find_unused_parameters": True}),
    ):
        model = Model(device)
        # the warning is given once per process; the cleared cache allows it again
        data_parallel._warn_per_rank.cache_clear()
        with pytest.warns(UserWarning, match="'t0'.*each rank.*DistributedModelParallel|'t0'.*each rank's own"):
            parallel = wrap(model, device, **options) if wrap is model_parallel else wrap(model, **options)
        for _ in range(2):
            parallel.zero_grad()
            parallel(Sample(jagged({"f0": [[rank + 1]]})))[0].backward()
            average_of_ranks(model)
        assert model.tables.table_ids("t0").tolist() == [rank + 1]


def test_each_rank_has_its_own_tables(device: torch.device, tmp_path: Path) -> None:
    run_ranks(run_rank, device, tmp_path)


def test_names_to_ignore_are_kept(device: torch.device, alone: None) -> None:
    model = torch.nn.ModuleDict({"inner": Model(device)})
    model._ddp_params_and_buffers_to_ignore = ["inner.dense.bias"]
    parallel = DistributedDataParallel(model)
    assert {"inner.dense.bias", "inner.tables.embedding_bags.t0.weight"} <= parallel.parameters_to_ignore
    assert model._ddp_params_and_buffers_to_ignore == ["inner.dense.bias"]


def test_tables_that_an_optimizer_of_torch_is_to_train_are_refused_at_once(device: torch.device, alone: None) -> None:
    """In scripts for Rec SDK, unsharded hash tables are dense parameters that a torch optimizer trains.

    Such scripts fail here as soon as DistributedDataParallel wraps the model.

    """
    model = torch.nn.Sequential(capacity_collection(device))
    with pytest.raises(RuntimeError, match=r"\['t0'\].*apply_optimizer_in_backward.*torchrec\.EmbeddingBagC"):
        DistributedDataParallel(model)
    read = torch.nn.Sequential(model[0], torch.nn.Linear(4, 1).to(device)).eval()
    DistributedDataParallel(read)
    apply(model[0])
    DistributedDataParallel(read.train())


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_torchs_distributed_state_dicts(device: torch.device, alone: None, full: bool, wrapped: bool) -> None:
    """The state dicts of the model and of the dense optimizer can be loaded, also through DistributedDataParallel."""
    options = dcp.StateDictOptions(full_state_dict=full)
    made = [Model(device), Model(device)]
    trained, fresh = (DistributedDataParallel(model) if wrapped else model for model in made)
    optimizers = [torch.optim.Adam(model.dense.parameters()) for model in made]
    trained(BATCHES[0])[0].backward()
    optimizers[0].step()
    state = dcp.get_model_state_dict(trained, options=options)
    assert not list(differing_tensors(state, made[0].state_dict()))
    dcp.set_model_state_dict(fresh, state, options=options)
    assert not list(differing_tensors(made[1].state_dict(), made[0].state_dict()))
    if not wrapped:
        again, state = dcp.get_state_dict(trained, optimizers[0], options=options)
        dcp.set_state_dict(fresh, optimizers[1], model_state_dict=again, optim_state_dict=state, options=options)
        both = [o.state[m.dense.weight]["exp_avg"] for o, m in zip(optimizers, made, strict=True)]
        assert torch.equal(*both)
