"""Models with tables under torch.fx, torch.compile and torch.export behave like the model itself."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import jagged, numbered
from collection_factory import SEQUENCE, Model, apply, bags_collection
from embeddings import embedding_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torchrec import KeyedJaggedTensor
from torchrec.fx import Tracer
from torchrec.optim import CombinedOptimizer
from training import differing_tensors, train_step

from rec_sdk_torch import Pooling, TableConfig
from rec_sdk_torch.operators.devices import backends
from rec_sdk_torch.runtime import eager
from rec_sdk_torch.tbe.cache.transfers import Transfers

UNTRACEABLE = "embedding tables cannot be traced.*without fullgraph.*export the dense part"


@pytest.fixture(autouse=True)
def _nothing_is_compiled() -> None:
    """Resets torch's compiler, which would refuse to compile code that earlier tests have compiled too often."""
    torch._dynamo.reset()


class Sequences(Model):
    """A model that passes the batch to its tables as a keyword argument."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, kind=SEQUENCE)

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        return self.dense(self.tables(features=batch)["f0"].values())


class InputBuildingModel(Model):
    """A model that builds its KeyedJaggedTensor itself."""

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        return super().forward(KeyedJaggedTensor(keys=["f0"], values=batch.values(), lengths=batch.lengths()))


BATCHES = [jagged({"f0": [[1, 2], [i], []]}) for i in range(3)]


def learned(model: Any) -> list[torch.Tensor]:
    outputs: list[torch.Tensor] = []
    for batch in BATCHES:
        outputs.append(model(batch))
        outputs[-1].square().sum().backward()
    return outputs


def assert_train_the_same(one: Any, other: Any) -> None:
    """Checks that training both models gives the same results."""
    assert all(map(torch.equal, learned(one), learned(other)))
    assert not list(differing_tensors(one.state_dict(), other.state_dict()))


TRACERS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "torch.fx": torch.fx.symbolic_trace,
    "torchrec.fx": lambda model: torch.fx.GraphModule(model, Tracer().trace(model)),
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
}


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("kind", [Model, Sequences, InputBuildingModel])
def test_a_traced_model_trains_the_same(device: torch.device, kind: Any, tracer: str) -> None:
    plain = kind(device)
    traced = copy.deepcopy(plain)
    assert all(map(torch.equal, learned(TRACERS[tracer](traced)), learned(plain)))
    assert not list(differing_tensors(traced.state_dict(), plain.state_dict()))


def test_a_collection_is_one_node(device: torch.device) -> None:
    graph = torch.fx.symbolic_trace(Model(device)).graph
    assert [node.target for node in graph.nodes if node.op == "call_module"] == ["tables", "dense"]


class Lower(torch.nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        table = TableConfig("t0", num_embeddings=10, embedding_dim=4, pooling=Pooling.SUM)
        self.embedding = embedding_of(table, device=device)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.embedding(ids, offsets=offsets).square()


def test_a_table_batched_embedding_is_one_node(device: torch.device) -> None:
    plain = Lower(device)
    traced = torch.fx.symbolic_trace(copy.deepcopy(plain))
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["embedding"]
    ids, offsets = torch.tensor([3, 3]), torch.tensor([0, 1, 2])
    for _ in range(2):
        outputs = traced(ids, offsets), plain(ids, offsets)
        assert torch.equal(*outputs)
        for output in outputs:
            output.sum().backward()


class FromTensors(torch.nn.Module):
    """A module that torch.jit can call with tensors."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training  # the mode to which the ONNX exporter resets all submodules

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.model(KeyedJaggedTensor(keys=["f0"], values=ids, lengths=lengths))
        return output


def under_fake_tensors(work: Callable[[], Any], **options: Any) -> None:
    with FakeTensorMode(**options):
        work()


TENSORS = torch.tensor([1, 2, 3]), torch.tensor([2, 1])
UNTRACEABLE_BY: dict[str, Callable[[Any], Any]] = {
    "export": lambda model: torch.export.export(model, (BATCHES[0],)),
    "strict export": lambda model: torch.export.export(model, (BATCHES[0],), strict=True),
    "fullgraph": lambda model: torch.compile(model, fullgraph=True, backend="eager")(BATCHES[0]),
    "fx of a collection alone": lambda model: torch.fx.symbolic_trace(model.tables),
    "fake batch": lambda model: under_fake_tensors(lambda: model(numbered(2)), allow_non_fake_inputs=True),
    "fake table": lambda model: under_fake_tensors(lambda: bags_collection(torch.device("cpu"))),
    "jit.trace": lambda model: torch.jit.trace(FromTensors(model), TENSORS),
    "jit.script": torch.jit.script,
    "ONNX": lambda model: torch.onnx.export(FromTensors(model), TENSORS, io.BytesIO(), dynamo=False),
    "make_fx": lambda model: make_fx(FromTensors(model))(*TENSORS),
}


@pytest.mark.parametrize("way", UNTRACEABLE_BY)
@pytest.mark.parametrize("training", [True, False])
def test_untraceable_uses_are_refused(device: torch.device, way: str, training: bool) -> None:
    """After the error, the model can still be used."""
    model = Model(device).train(training)
    twin = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match=UNTRACEABLE):
        UNTRACEABLE_BY[way](model)
    assert_train_the_same(model, twin)


@pytest.mark.parametrize("way", [torch.jit.script, lambda lower: torch.jit.trace(lower, TENSORS)])
def test_untraceable_uses_of_a_table_batched_embedding_are_refused(device: torch.device, way: Any) -> None:
    with pytest.raises(RuntimeError, match=UNTRACEABLE):
        way(Lower(device))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_autograd(device: torch.device, fullgraph: bool) -> None:
    """Under compiled autograd, the update in the backward pass is a graph break."""
    plain = Model(device)
    model = copy.deepcopy(plain)
    refused = pytest.raises(RuntimeError, match=UNTRACEABLE) if fullgraph else contextlib.nullcontext()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=fullgraph)), refused:
        learned(model)
    if not fullgraph:
        learned(plain)
        assert not list(differing_tensors(model.state_dict(), plain.state_dict()))
    assert not list(
        differing_tensors(model.tables.fused_optimizer.state_dict(), plain.tables.fused_optimizer.state_dict())
    )
    learned(model)


@pytest.fixture(params=["cuda", "npu"])
def capture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Emulates a device's streams; `on` is whether the current stream is being captured."""
    state = SimpleNamespace(on=False, kind=request.param)
    stand_in = SimpleNamespace(is_current_stream_capturing=lambda: state.on)
    monkeypatch.setattr(torch, state.kind, stand_in, raising=False)
    nothing: dict[str, Any] = {"load": lambda: None, "start": lambda device: None}
    monkeypatch.setitem(backends._BACKENDS, state.kind, replace(backends._BACKENDS[state.kind], **nothing))
    monkeypatch.setattr(eager, "_capturing", {})
    device: Any = SimpleNamespace(type=state.kind)
    backends.backend_for(device)
    return state


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("make", [Model, Sequences, Lower])
def test_lookups_are_not_captured(device: torch.device, capture: SimpleNamespace, make: Any, train: bool) -> None:
    if device.type != "cpu":
        pytest.skip("the stand-in is for a device that is not there")
    model = make(device)
    model.train(train)
    inputs = (torch.tensor([1, 2]), torch.tensor([0, 1, 2])) if make is Lower else (BATCHES[0],)
    model(*inputs)
    state = model.state_dict()
    capture.on = True
    with pytest.raises(RuntimeError, match=rf"cannot be used while torch\.{capture.kind}\.graph captures a stream"):
        model(*inputs)
    capture.on = False
    assert not list(differing_tensors(state, model.state_dict()))
    model(*inputs)


def test_updates_are_not_captured(device: torch.device, capture: SimpleNamespace) -> None:
    """Checks the guard that every use of a cache on a device calls first: it raises while a stream is captured."""
    if device.type != "cpu":
        pytest.skip("the stand-in is for a device that is not there")
    transfers = Transfers(device, replace(backends.backend_for(device), pin_staging=True))
    capture.on = True
    with pytest.raises(RuntimeError, match=rf"torch\.{capture.kind}\.graph"):
        transfers.follow_previous_stream()


def test_captures_on_a_device_are_detected(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        pytest.skip("the CPU has no streams")
    model = Model(device)
    learned(model)
    if device.type not in eager._capturing:
        pytest.skip("this version of the device's package has no graphs")
    monkeypatch.setitem(eager._capturing, device.type, lambda: True)
    with pytest.raises(RuntimeError, match="captures a stream"):
        model(BATCHES[0])


USES: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "fused_optimizer.step": lambda tables: lambda: [tables.fused_optimizer.step()],
    "step": lambda tables: tables.fused_optimizer.step,
    "CombinedOptimizer.step": lambda tables: CombinedOptimizer([tables.fused_optimizer]).step,
    "zero_grad": lambda tables: lambda: [tables.fused_optimizer.zero_grad()],
    "gradients": lambda tables: lambda: [handle.grad for handle in tables.parameters()],
    "gradients that are set": lambda tables: lambda: [setattr(h, "grad", None) for h in tables.parameters()],
    "clip_grad_norm_": lambda tables: lambda: clip_grad_norm_(tables.parameters(), 0.1),
    "clip_grad_value_": lambda tables: lambda: clip_grad_value_(tables.parameters(), 0.1),
    "grad_norm": lambda tables: lambda: tables.grad_norm().total,
    "rates": lambda tables: lambda: tables.fused_optimizer.param_groups[0]["lr"],
    "states": lambda tables: lambda: tables.fused_optimizer.state_dict()["state"],
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("update", ["backward", "step"])
def test_optimizers_in_compiled_functions(device: torch.device, use: str, update: str) -> None:
    """Results match eager execution, both in the call that compiles the function and in later calls."""
    if update == "backward" and use.startswith(("clip", "grad_norm")):
        pytest.skip("an error by itself, too")
    tables = [apply(bags_collection(device, update=update), torch.optim.Adam) for _ in range(2)]
    plain = USES[use](tables[0])
    compiled = torch.compile(USES[use](tables[1]), backend="eager")
    for batch in BATCHES[:2]:
        for each in tables:
            train_step(each, batch, square=True)
        torch.testing.assert_close(compiled(), plain(), rtol=0, atol=0)
        for each in tables:
            each.fused_optimizer.step()
        assert not list(differing_tensors(tables[0].state_dict(), tables[1].state_dict()))
