"""Torch's own functions on a table's parameter handle, which holds no rows: each either works or raises an error."""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import numbered, single_ids
from collection_factory import EACH_KIND, POOLED, Kind, Model, apply, bags_collection, index_bag_config
from torch.ao.quantization import quantize_dynamic
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchrec.inference.modules import quantize_embeddings
from training import assert_trains, equal_rows, rows_of

import rec_sdk_torch as rst
from rec_sdk_torch.optim import torchrec_hooks
from rec_sdk_torch.optim.handles import TableParameter


def in_place(change: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], object]:
    return torch.no_grad()(change)


def new_data(handle: torch.Tensor) -> None:
    handle.data = torch.ones(40, 4)


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "normal_": torch.nn.init.normal_,
    "uniform_": torch.nn.init.uniform_,
    "constant_": lambda handle: torch.nn.init.constant_(handle, 1.0),
    "zero_": torch.nn.init.zeros_,
    "fill_": in_place(lambda handle: handle.fill_(1.0)),
    "copy_": in_place(lambda handle: handle.copy_(torch.ones(()))),
    "div_": in_place(lambda handle: handle.detach().div_(2.0)),
    "lerp_": in_place(lambda handle: handle.data.lerp_(torch.ones(()), 0.5)),
    "add_": in_place(lambda handle: handle.detach().data.add_(1.0)),
    "_foreach_add_": in_place(lambda handle: torch._foreach_add_([torch.ones(1), handle], 1.0)),
    "add": in_place(lambda handle: torch.add(handle, 1.0, out=handle)),
    "mul_": in_place(lambda handle: operator.imul(handle, 2)),
    "__setitem__": in_place(lambda handle: operator.setitem(handle, slice(None), 1.0)),
    "data": new_data,
}


def trained(kind: Kind, device: torch.device, *configs: Any) -> Any:
    """Builds and trains a collection; returns it and its parameter handle."""
    collection = apply(kind.collection(device, *configs))
    assert_trains(collection)
    (handle,) = collection.parameters()
    assert isinstance(handle, TableParameter)
    return collection, handle


@EACH_KIND
@pytest.mark.parametrize("name", WRITES)
def test_writing_is_refused(device: torch.device, kind: Kind, name: str) -> None:
    collection, handle = trained(kind, device)
    before = rows_of(collection)
    with pytest.raises(RuntimeError, match=rf"'t0': {name} on its parameter would change no row.*init_fn"):
        WRITES[name](handle)
    assert handle.shape == (0, 4)
    assert equal_rows(rows_of(collection), before)
    assert_trains(collection)


def test_initializers_that_read_the_shape_work_or_raise(device: torch.device) -> None:
    _, handle = trained(POOLED, device, index_bag_config(num_embeddings=8))
    init = torch.nn.init
    for fill in (init.xavier_uniform_, init.xavier_normal_, init.kaiming_uniform_, init.trunc_normal_, init.eye_):
        with pytest.raises((RuntimeError, ZeroDivisionError)):
            fill(handle)
    with pytest.warns(UserWarning, match="zero-element tensors is a no-op"):  # the message is torch's own
        init.kaiming_normal_(handle)


def test_reading_functions_still_work(device: torch.device) -> None:
    collection, handle = trained(POOLED, device)
    assert handle.detach().shape == handle.data.shape == handle.clone().shape == (0, 4)
    assert handle.sum().item() == 0.0
    assert type(handle.detach().clone()) is torch.Tensor
    assert isinstance(handle, torch.nn.Parameter)
    assert not isinstance(handle.detach(), torch.nn.Parameter)
    assert "size=(0, 4)" in repr(handle)
    handle.grad = None
    torch.optim.SGD(collection.parameters(), lr=9.0).zero_grad()
    dense = torch.ones(2, 4, device=device)
    dense[:0].copy_(handle.detach())
    assert_trains(collection)


def test_sharing_memory_is_refused(device: torch.device) -> None:
    """`share_memory` cannot share a table's rows and raises; dense modules can still share their memory."""
    model = Model(device)
    for module in (model, model.tables, model.tables.embedding):
        with pytest.raises(RuntimeError, match=r"cannot be shared with other processes.*TableReader"):
            module.share_memory()
    assert torch.equal(model.dense.share_memory().weight, model.dense.weight)
    assert_trains(model.tables)


QUANTIZES: dict[str, Callable[[torch.nn.Module], Any]] = {
    "quantize_embeddings": lambda model: quantize_embeddings(model, torch.qint8, inplace=True),
    "a copy": lambda model: quantize_embeddings(model, torch.qint8, inplace=False),
    "quantize_dynamic by class": lambda model: quantize_dynamic(model, {type(model.tables)}, inplace=True),
    "EmbeddingBag": lambda model: quantize_dynamic(model, dtype=torch.quint8, inplace=True),
}


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.parametrize("way", QUANTIZES)
@EACH_KIND
def test_quantizing_tables_is_refused(device: torch.device, way: str, kind: Kind) -> None:
    model = Model(device, kind=kind)
    with pytest.raises(TypeError, match=r"tables \['t0'\] cannot be quantized.*rec_sdk_torch\.export\.quantized"):
        QUANTIZES[way](model)
    assert_trains(model.train().tables)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:torch.quantize_per_tensor")
def test_the_dense_part_can_be_quantized() -> None:
    model = Model(torch.device("cpu"))
    small = quantize_dynamic(model, {torch.nn.Linear})
    assert type(small.dense) is not torch.nn.Linear
    assert small(numbered(3)).shape == (1, 1)
    stock = torch.nn.ModuleDict({"bag": torch.nn.EmbeddingBag(4, 4)})
    assert type(quantize_dynamic(stock, dtype=torch.quint8)["bag"]) is not torch.nn.EmbeddingBag


PARAMETRIZES: dict[str, Callable[[torch.nn.Module], Any]] = {
    "parametrize": lambda module: parametrize.register_parametrization(module, "weight", torch.nn.Identity()),
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "prune": lambda module: prune.l1_unstructured(module, "weight", 0.5),
    "delete": lambda module: delattr(module, "weight"),
}


@pytest.mark.parametrize("way", PARAMETRIZES)
def test_a_parameter_is_not_parametrized(device: torch.device, way: str) -> None:
    model = Model(device)
    with pytest.raises(RuntimeError, match=r"table 't0'.*change no row"):
        PARAMETRIZES[way](model.tables.embedding_bags["t0"])
    assert_trains(model.tables)


def test_an_average_of_models_is_refused(device: torch.device) -> None:
    """The averaged model raises at its first update; averaging only the dense part works."""
    model = Model(device)
    for options in ({}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}, {"use_buffers": True}):
        averaged = AveragedModel(model, **options)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"'t0': copy_ on its parameter.*AveragedModel.*dense modules only"):
                averaged.update_parameters(model)
    dense = AveragedModel(model.dense)
    dense.update_parameters(model.dense)
    assert_trains(model.tables)


def test_another_parameter_is_refused(device: torch.device) -> None:
    model, other = Model(device), Model(device)
    name = "tables.embedding_bags.t0.weight"
    dense = {key: torch.zeros_like(p) for key, p in model.named_parameters() if key != name}
    batch = single_ids([1, 2])
    for instead in (torch.nn.Parameter(torch.ones(40, 4)), torch.ones(40, 4), other.get_parameter(name)):
        with pytest.raises(RuntimeError, match=r"'t0'.*cannot be replaced.*functional_call"):
            torch.func.functional_call(model, {**dense, name: instead}, batch)
        assert model(batch).abs().sum() > 0, "what had been replaced is back"
    with pytest.raises(RuntimeError, match=r"'t0'.*cannot be replaced by a Parameter"):
        model.tables.embedding_bags["t0"].weight = torch.nn.Parameter(torch.ones(40, 4))
    with pytest.raises(RuntimeError, match="'t0'"):
        torch.func.functional_call(model, {**model.state_dict(), **dense}, batch)
    for given in (dense, {**dict(model.named_parameters()), **dense}):
        assert not torch.func.functional_call(model, given, batch).any()
    assert_trains(model.tables)


@pytest.mark.parametrize("training", [True, False])
def test_a_function_that_torch_transforms(device: torch.device, training: bool) -> None:
    """The tables are looked up first; the transformed function uses only their outputs."""
    model = Model(device).train(training)
    batch = single_ids([1, 2])
    dense = {name: p.detach() for name, p in model.named_parameters() if name.startswith("dense.")}
    with pytest.raises(RuntimeError, match=r"cannot be looked up in a function that torch\.func transforms"):
        torch.func.grad(lambda given: torch.func.functional_call(model, given, batch).sum())(dense)
    everything = {name: p.detach() for name, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match=r"'t0'.*cannot be replaced"):
        torch.func.grad(lambda given: torch.func.functional_call(model, given, batch).sum())(everything)
    rows = model.tables(batch).values().detach()
    own = {name.removeprefix("dense."): p for name, p in dense.items()}
    grads = torch.func.grad(lambda given: torch.func.functional_call(model.dense, given, rows).sum())(own)
    torch.testing.assert_close(grads["weight"], rows.sum(0, keepdim=True))
    assert_trains(model.tables.train())


CLIPS = pytest.mark.parametrize("clip", [clip_grad_norm_, clip_grad_value_])


@CLIPS
def test_clipping_tables_is_refused(device: torch.device, clip: Any) -> None:
    """This includes clipping functions that were imported before the first collection was built."""
    model = Model(device)
    model(numbered(2)).sum().backward()
    (handle,) = model.tables.parameters()
    message = r"clip_grad_\w+ cannot clip.*\['t0'\].*gradient_clipping=True and max_grad"
    for parameters in (model.tables.parameters(), [handle], handle):
        with pytest.raises(ValueError, match=message):
            clip(parameters, 0.1)
    assert_trains(model.tables)


@CLIPS
@pytest.mark.parametrize("named", [False, True])
def test_clipping_a_model_clips_the_dense_part(device: torch.device, clip: Any, named: bool) -> None:
    torchrec_hooks.warn_tables_not_clipped.cache_clear()
    model = Model(device)
    options = {"foreach": False} if named else {}
    for time in range(2):
        model(numbered(2)).sum().backward()
        expected = copy.deepcopy(model.dense)
        for parameter, twin in zip(model.dense.parameters(), expected.parameters(), strict=True):
            twin.grad = parameter.grad.clone()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = clip(model.parameters(), 0.1, **options)
        assert [("only gradients of dense parameters" in str(w.message), w.filename) for w in caught] == [
            (True, __file__)
        ][time:]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            reference = clip(expected.parameters(), 0.1)
        assert result is reference is None or torch.equal(result, reference)
        for parameter, twin in zip(model.dense.parameters(), expected.parameters(), strict=True):
            assert torch.equal(parameter.grad, twin.grad)


def test_clipping_without_tables_is_torchs(device: torch.device) -> None:
    bags_collection(device)
    dense = torch.nn.Linear(2, 1)
    dense.weight.grad = torch.full((1, 2), 3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert clip_grad_norm_(dense.weight, 1.0) > 4
        clip_grad_value_([dense.weight], 0.5)
    with pytest.warns(UserWarning, match="empty generator"):
        clip_grad_norm_((p for p in ()), 1.0)
    assert torch.nn.utils.clip_grad_norm_ is clip_grad_norm_
    assert dense.weight.grad.abs().max() <= 0.5
    assert rst.EmbCacheEmbeddingBagCollection.__name__ in repr(bags_collection(device))
