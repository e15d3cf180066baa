"""First use under another mode of the caller: inference mode, default dtype, default device.

The reference is the same training by a caller without any mode: the bits must be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from jagged import apply, bag_config, bags_collection, jagged, output_values, sequence_config, sequences_collection
from torchrec import EmbeddingBagConfig

import rec_sdk_torch as rst


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


def pooled(device: torch.device, window: int) -> torch.nn.Module:
    index = EmbeddingBagConfig(num_embeddings=16, embedding_dim=8, name="t1", feature_names=["f1"])
    return optimized(bags_collection(device, bag_config(), index, cache=4), window)


def sequence(device: torch.device, window: int) -> torch.nn.Module:
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
    """What is laid out then, with the optimizer's states, serves a training without the mode."""
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
def test_mode_in_the_middle_of_a_window(device: torch.device, make: Any) -> None:
    """Reads in inference mode, and saves, while rows with pending sums come and go."""
    collection, plain = make(device, 3), make(device, 3)
    for steps in (2, 3, 4):
        assert_same(train(collection, steps), train(plain, steps))
        with torch.inference_mode():
            reads(collection)
            save(collection)
    assert_same(save(collection), save(plain))
