"""First use under another mode of the caller: inference mode, default dtype, default device.

The reference is the same training by a caller without any mode: the bits must be the same. Tables that
are made without a device have TorchRec's collection as their reference, which follows the default device.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from jagged import apply, bag_config, bags_collection, jagged, output_values, sequence_config, sequences_collection
from torch.utils._device import _device_constructors
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

import rec_sdk_torch as rst

PACKAGE = Path(rst.__file__).parent


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def hashed(device: Any) -> Any:
    config = rst.HashEmbeddingBagConfig(name="t0", num_embeddings=40, embedding_dim=4, feature_names=["f0"])
    return rst.HashEmbeddingBagCollection([config], device=device)


MAKE: dict[str, Callable[[Any], Any]] = {
    "bags": bags_collection,
    "sequences": sequences_collection,
    "hash": hashed,
    "embedding": lambda device: rst.TableBatchedEmbedding([rst.TableConfig("t0", 40, 4)], device=device),
}


@pytest.mark.parametrize("enter", [default_device, torch.device], ids=["set_default_device", "with"])
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("where", ["meta", "device"])
def test_tables_follow_the_default_device(device: torch.device, kind: str, enter: Any, where: str) -> None:
    with enter(device.type if where == "device" else where):
        found, given = MAKE[kind](None), MAKE[kind]("cpu")
        theirs = EmbeddingBagCollection([EmbeddingBagConfig(num_embeddings=40, embedding_dim=4, name="t0")])
        assert found.device == theirs.device
        assert {parameter.device for parameter in found.parameters()} <= {theirs.device}
        assert given.device == torch.device("cpu")
    assert MAKE[kind](None).device == torch.device("cpu")


def on_the_default_device(file: Path) -> Iterator[int]:
    """Lines that make a tensor without saying where."""
    names = {function.__name__ for function in _device_constructors()}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names:
            of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if of_torch and all(keyword.arg != "device" for keyword in node.keywords):
                yield node.lineno


def test_no_tensor_of_the_package_follows_the_default_device() -> None:
    """One that did would be elsewhere, or without values, wherever a caller has set one."""
    by_themselves = {"npu_report.py", "operator_cases.py"}  # a program, and what it runs
    files = [file for file in PACKAGE.rglob("*.py") if file.name not in by_themselves]
    assert len(files) > 100
    assert {str(file): lines for file in files if (lines := list(on_the_default_device(file)))} == {}


MODES: dict[str, Callable[[], Any]] = {
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: default_device("meta"),
}

KEYS = ["f0", "f1"]
BATCHES = [jagged({key: [[i + 3, i], [i + 1], []] for key in KEYS}) for i in range(0, 12, 2)]
for made in BATCHES:
    made.offsets()  # beforehand, as the rest: the tests are about what the collection allocates


def pooled(device: torch.device | None, window: int) -> torch.nn.Module:
    index = EmbeddingBagConfig(num_embeddings=16, embedding_dim=8, name="t1", feature_names=["f1"])
    return optimized(bags_collection(device, bag_config(), index, cache=4), window)


def sequence(device: torch.device | None, window: int) -> torch.nn.Module:
    tables = [sequence_config(), sequence_config("t1", ("f1",), embedding_dim=8)]
    return optimized(sequences_collection(device, *tables, cache=4), window)


def optimized(collection: torch.nn.Module, window: int) -> torch.nn.Module:
    if window == 1:
        apply(collection, torch.optim.Adam)
    else:
        apply(collection, rst.AccumulateAdam, use_accumulate=True, accumulate_step=window)
    return collection


def reads(collection: torch.nn.Module) -> list[torch.Tensor]:
    collection.eval()
    outputs = [output_values(collection(batch)).detach() for batch in BATCHES]
    collection.train()
    return outputs


def train(collection: torch.nn.Module, steps: int) -> list[torch.Tensor]:
    outputs = []
    for batch in BATCHES[:steps]:
        output = output_values(collection(batch))
        output.square().sum().backward()
        outputs.append(output.detach())
    return outputs


def save(collection: Any) -> list[torch.Tensor]:
    states = collection.fused_optimizer.state_dict()["state"]
    values = [value for _, state in sorted(states.items()) for _, value in sorted(state.items())]
    return [*collection.state_dict().values(), *values]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.device) == (other.dtype, other.device)
        assert torch.equal(one, other)


KINDS = pytest.mark.parametrize("make", [pooled, sequence])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", [1, 3])
@KINDS
def test_first_use_in_a_mode(device: torch.device, make: Any, window: int, mode: str) -> None:
    """Tables that are laid out then, with the optimizer's states, serve a training without the mode."""
    collection, plain = make(device, window), make(device, window)
    with MODES[mode]():
        found = [*save(collection), *reads(collection)]
    assert_same(found, [*save(plain), *reads(plain)])
    assert_same(train(collection, 6), train(plain, 6))
    assert_same(save(collection), save(plain))


@pytest.mark.parametrize("mode", ["bfloat16", "float64", "meta"])
@pytest.mark.parametrize("window", [1, 3])
@KINDS
def test_all_in_a_mode(device: torch.device, make: Any, window: int, mode: str) -> None:
    with MODES[mode]():
        collection = make(device, window)
        found = [*train(collection, 6), *reads(collection), *save(collection)]
        twin = make(device, window)
        twin.load_state_dict(collection.state_dict())
        found += reads(twin)
    plain = make(device, window)
    expected = [*train(plain, 6), *reads(plain), *save(plain)]
    again = make(device, window)
    again.load_state_dict(plain.state_dict())
    assert_same(found, expected + reads(again))


@KINDS
def test_trains_on_the_default_device(device: torch.device, make: Any) -> None:
    plain = make(device, 3)
    expected = [*train(plain, 6), *reads(plain), *save(plain)]
    with torch.device(device):
        collection = make(None, 3)
        found = [*train(collection, 6), *reads(collection), *save(collection)]
    assert_same(found, expected)


@pytest.mark.parametrize("mode", ["bfloat16", "float64", "meta"])
def test_norms_of_gradients_in_a_mode(device: torch.device, mode: str) -> None:
    """Also of a table for which no gradient waits."""
    index = EmbeddingBagConfig(num_embeddings=16, embedding_dim=8, name="t1", feature_names=["f1"])
    collection: Any = optimized(bags_collection(device, bag_config(), index, cache=4, update="step"), 1)
    dict(collection.named_parameters())["embedding_bags.t1.weight"].requires_grad_(False)
    for expected in (False, True):
        with MODES[mode]():
            found = collection.grad_norm()
        assert found == collection.grad_norm()
        assert (found.total > 0, found.tables["t0"] > 0, found.tables["t1"]) == (expected, expected, 0)
        collection(BATCHES[0]).values().square().sum().backward()


@KINDS
def test_mode_in_the_middle_of_a_window(device: torch.device, make: Any) -> None:
    """Reads in inference mode, and saves, while rows with pending sums come and go."""
    collection, plain = make(device, 3), make(device, 3)
    for steps in (2, 3, 4):
        assert_same(train(collection, steps), train(plain, steps))
        with torch.inference_mode():
            reads(collection)
            save(collection)
    assert_same(save(collection), save(plain))
