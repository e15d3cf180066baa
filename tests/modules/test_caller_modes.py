"""Tables whose first use is under one of the caller's modes: inference mode, default dtype, default device.

Results must be bit-identical to the same training without any mode. For tables that are built without a device, the
reference is TorchRec's collection, which is created on the default device.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import jagged
from collection_factory import (
    EACH_KIND,
    SEQUENCE,
    Kind,
    apply,
    bag_config,
    bags_collection,
    capacity_collection,
    index_bag_config,
    sequences_collection,
)
from torch.utils._device import _device_constructors
from torchrec import EmbeddingBagCollection
from training import read, train

import rec_sdk_torch as rst

PACKAGE = Path(rst.__file__).parent


@contextmanager
def default(setter: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    """Sets one of torch's defaults within the block."""
    setter(value)
    try:
        yield
    finally:
        setter(before)


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    return default(torch.set_default_dtype, dtype, torch.get_default_dtype())


def default_device(device: str) -> AbstractContextManager[None]:
    return default(torch.set_default_device, device, None)


MAKE: dict[str, Callable[[Any], Any]] = {
    "bags": bags_collection,
    "sequences": sequences_collection,
    "hash": capacity_collection,
    "embedding": lambda device: rst.TableBatchedEmbedding([rst.TableConfig("t0", 40, 4)], device=device),
}


@pytest.mark.parametrize("enter", [default_device, torch.device], ids=["set_default_device", "with"])
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("where", ["meta", "device"])
def test_tables_follow_the_default_device(device: torch.device, kind: str, enter: Any, where: str) -> None:
    with enter(device.type if where == "device" else where):
        found, given = MAKE[kind](None), MAKE[kind]("cpu")
        theirs = EmbeddingBagCollection([index_bag_config("t0", ())])
        assert found.device == theirs.device
        assert {parameter.device for parameter in found.parameters()} <= {theirs.device}
        assert given.device == torch.device("cpu")
    assert MAKE[kind](None).device == torch.device("cpu")


def on_the_default_device(file: Path) -> Iterator[int]:
    """Yields the numbers of the lines that create a tensor without a device argument."""
    names = {function.__name__ for function in _device_constructors()}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names:
            of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if of_torch and all(keyword.arg != "device" for keyword in node.keywords):
                yield node.lineno


def test_no_tensor_of_the_package_follows_the_default_device() -> None:
    """A tensor created on the caller's default device would be on the wrong device, or have no values (meta device)."""
    by_themselves = {"npu_report.py", "operator_cases.py"}  # a command-line program and the module that it runs
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
for batch_of_ids in BATCHES:
    batch_of_ids.offsets()  # computed in advance, so that the tests cover only the collection's allocations


WINDOWS = pytest.mark.parametrize("window", [1, 3])


def made(device: torch.device | None, kind: Kind, window: int) -> Any:
    """Builds a hash table t0 and, in another group, t1: an index table if the collection is pooled, else a hash
    table.
    """
    other = kind.index("t1", ["f1"], num_embeddings=16, embedding_dim=8)
    if kind is SEQUENCE:
        other = kind.config("t1", ["f1"], embedding_dim=8)
    return apply(kind.collection(device, kind.config(), other, cache=4), torch.optim.Adam, window=window)


def outputs_of_training(collection: Any, steps: int = 6) -> list[torch.Tensor]:
    return train(collection, BATCHES[:steps], square=True)


def observed(collection: Any) -> list[torch.Tensor]:
    """Returns the collection's saved values and the outputs of evaluation."""
    states = collection.fused_optimizer.state_dict()["state"]
    values = [value for _, state in sorted(states.items()) for _, value in sorted(state.items())]
    return [*collection.state_dict().values(), *values, *(read(collection, batch) for batch in BATCHES)]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.device) == (other.dtype, other.device)
        assert torch.equal(one, other)


@pytest.mark.parametrize("mode", MODES)
@WINDOWS
@EACH_KIND
def test_tables_first_used_in_a_mode_train_the_same(device: torch.device, kind: Kind, window: int, mode: str) -> None:
    """Tables and optimizer states that are created in a mode have the same values as without it, and train on."""
    collection, plain = made(device, kind, window), made(device, kind, window)
    with MODES[mode]():
        found = observed(collection)
    assert_same(found, observed(plain))
    assert_same(outputs_of_training(collection), outputs_of_training(plain))
    assert_same(observed(collection), observed(plain))


@pytest.mark.parametrize("mode", ["bfloat16", "float64", "meta", "the device"])
@WINDOWS
@EACH_KIND
def test_training_in_a_mode_is_the_same(device: torch.device, kind: Kind, window: int, mode: str) -> None:
    """The modes include a default device, for tables that are built without a device argument."""

    def everything(where: torch.device | None) -> list[torch.Tensor]:
        collection, twin = made(where, kind, window), made(where, kind, window)
        outputs = outputs_of_training(collection)
        twin.load_state_dict(collection.state_dict())
        return [*outputs, *observed(collection), *observed(twin)]

    expected = everything(device)
    with torch.device(device) if mode == "the device" else MODES[mode]():
        found = everything(None if mode == "the device" else device)
    assert_same(found, expected)


@pytest.mark.parametrize("mode", ["bfloat16", "float64", "meta"])
def test_norms_of_gradients_in_a_mode(device: torch.device, mode: str) -> None:
    """Table t1 is frozen and has no pending gradient."""
    index = index_bag_config("t1", ["f1"], num_embeddings=16, embedding_dim=8)
    collection = apply(bags_collection(device, bag_config(), index, cache=4, update="step"), torch.optim.Adam)
    dict(collection.named_parameters())["embedding_bags.t1.weight"].requires_grad_(False)
    for expected in (False, True):
        with MODES[mode]():
            found = collection.grad_norm()
        assert found == collection.grad_norm()
        assert (found.total > 0, found.tables["t0"] > 0, found.tables["t1"]) == (expected, expected, 0)
        outputs_of_training(collection, 1)


@EACH_KIND
def test_mode_in_the_middle_of_a_window(device: torch.device, kind: Kind) -> None:
    """Reads and saves in inference mode alternate with training steps that swap rows with pending gradients."""
    collection, plain = made(device, kind, 3), made(device, kind, 3)
    for steps in (2, 3, 4):
        assert_same(outputs_of_training(collection, steps), outputs_of_training(plain, steps))
        with torch.inference_mode():
            observed(collection)
    assert_same(observed(collection), observed(plain))
