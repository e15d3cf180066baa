"""Changing the output of a forward pass in place trains like the same change out of place.

Results must be bit-identical to the same training out of place. No output is copied to allow this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import jagged
from collection_factory import (
    apply,
    bag_config,
    bags_collection,
    capacity_collection,
    index_bag_config,
    index_sequence_config,
    sequence_config,
    sequences_collection,
)
from training import differing_tensors, output_parts

import rec_sdk_torch as rst

KEYS = ("f0", "f1", "f2")
BATCHES = [jagged({key: [[i, i + 1, 3], [7], []] for key in KEYS}) for i in range(3)]


def pooled(device: torch.device) -> Any:
    index = index_bag_config("t1", ["f2"], embedding_dim=8)
    return bags_collection(device, bag_config(features=KEYS[:2]), index)


def sequences(device: torch.device, dim: int = 8, **options: Any) -> Any:
    index = index_sequence_config("t1", ["f2"], embedding_dim=dim)
    return sequences_collection(device, sequence_config(features=KEYS[:2]), index, **options)


COLLECTIONS: dict[str, Callable[..., Any]] = {
    "pooled": pooled,
    "pooled, one table": bags_collection,
    "hash": capacity_collection,
    "sequences": sequences,
    "sequences of one dim": lambda device: sequences(device, 4),
    "sequences, one feature": sequences_collection,
}


def part(output: torch.Tensor) -> torch.Tensor:
    output[:, :2] *= 3.0
    return output


def fill(output: torch.Tensor) -> torch.Tensor:
    output[:1] = 0.5
    return output


CHANGES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "relu": (torch.relu_, torch.relu),
    "mul_": (lambda output: output.mul_(0.5), lambda output: output * 0.5),
    "add_, tanh_": (lambda output: output.add_(1).tanh_(), lambda output: (output + 1).tanh()),
    "a part": (part, lambda output: part(output.clone())),
    "a fill": (fill, lambda output: fill(output.clone())),
}


def learned(collection: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    for batch in BATCHES:
        outputs = enumerate(output_parts(collection(batch)), start=1)
        torch.stack([number * change(output).square().sum() for number, output in outputs]).sum().backward()
    result: dict[str, torch.Tensor] = collection.state_dict()
    return result


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", COLLECTIONS)
def test_in_place_trains_as_out_of_place(device: torch.device, kind: str, change: str) -> None:
    found = []
    for way in CHANGES[change]:
        torch.manual_seed(0)
        found.append(learned(apply(COLLECTIONS[kind](device), torch.optim.Adagrad), way))
    assert not list(differing_tensors(*found))


@pytest.mark.parametrize("kind", COLLECTIONS)
def test_nothing_is_copied(device: torch.device, kind: str) -> None:
    """The outputs of a group's features share the memory of the lookup; a change in place adds one autograd node."""
    collection = COLLECTIONS[kind](device)
    apply(collection)
    outputs = output_parts(collection(BATCHES[0]))
    memory = {output.untyped_storage().data_ptr() for output in outputs}
    assert len(memory) == (2 if kind == "sequences" else 1)
    for output in outputs:
        where = output.data_ptr()
        assert not output._is_view()
        output.mul_(2)
        assert output.data_ptr() == where
        assert output.grad_fn is not None
        assert output.grad_fn.name() == "MulBackward0"


def test_a_change_of_one_feature_leaves_others_to_autograd(device: torch.device) -> None:
    """Autograd does not treat a change of one output as a change of another output saved for the backward pass."""
    collection = apply(sequences(device, 4))
    first, second, third = output_parts(collection(BATCHES[0]))
    product = first * second
    third.mul_(2)
    (product.sum() + third.sum()).backward()
    first, second, third = output_parts(collection(BATCHES[0]))
    product = first * second
    first.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("weighted", [False, True])
def test_evaluation_outputs_may_be_changed_in_place(device: torch.device, weighted: bool) -> None:
    """With per-sample weights that require gradients, evaluation outputs are part of the autograd graph too."""
    collection = bags_collection(device, is_weighted=weighted).eval()
    gradients = []
    for way in CHANGES["relu"]:
        weights = torch.tensor([1.0, -2.0, 3.0], device=device, requires_grad=True)
        batch = jagged({"f0": [[1, 2], [3]]}).to(device)
        batch._weights = weights if weighted else None
        output = way(collection(batch).values())
        if weighted:
            output.sum().backward()
            gradients.append(weights.grad)
    assert not weighted or torch.equal(*gradients)


@pytest.mark.parametrize("in_grad_mode", [False, True])
@pytest.mark.parametrize("kind", COLLECTIONS)
def test_evaluation_outputs_may_be_multiplied_by_a_parameter(
    device: torch.device, kind: str, in_grad_mode: bool
) -> None:
    """If outputs were views created without grad mode, autograd would refuse the change in place."""
    collection = COLLECTIONS[kind](device).eval()
    gradients = []
    for way in (torch.Tensor.mul_, torch.Tensor.mul):
        scale = torch.tensor(2.0, device=device, requires_grad=True)
        with torch.set_grad_enabled(in_grad_mode):
            outputs = output_parts(collection(BATCHES[0]))
        torch.stack([way(output, scale).sum() for output in outputs]).sum().backward()
        gradients.append(scale.grad)
    assert gradients[0] is not None
    assert torch.equal(*gradients)


def test_prefetched_outputs_may_be_changed_in_place(device: torch.device) -> None:
    found = []
    for way in CHANGES["relu"]:
        collection = apply(sequences(device, cache=10), torch.optim.Adagrad)
        learned(collection, way)
        for batch in rst.prefetch(BATCHES, collection):
            sum(way(output).sum() for output in output_parts(collection(batch))).backward()
        found.append(collection.state_dict())
    assert not list(differing_tensors(*found))
