"""Per-sample weights: their gradients are computed from the rows that the forward read, in the weights' dtype.

The reference is plain torch on copies of the rows, made at the time of the forward pass.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from batches import jagged
from collection_factory import apply, bag_config, bags_collection
from embeddings import embedding_of
from torchrec import KeyedJaggedTensor
from training import train

from rec_sdk_torch.tbe import Pooling, TableBatchedEmbedding, TableConfig

LENGTHS = [2, 1, 0, 3] * 2  # bag lengths of both features
IDS = 10


def batch(seed: int, device: torch.device) -> KeyedJaggedTensor:
    """Builds a batch of features f0 and f1 with few distinct ids, so that batches share rows."""
    rng = np.random.default_rng(seed)
    weights = torch.from_numpy(rng.normal(size=sum(LENGTHS)).astype(np.float32)).to(device)
    return KeyedJaggedTensor(
        keys=["f0", "f1"],
        values=torch.from_numpy(rng.integers(0, IDS, sum(LENGTHS))),
        lengths=torch.tensor(LENGTHS),
        weights=weights.requires_grad_(),
    )


def expected_grad(tables: Sequence[torch.Tensor], given: KeyedJaggedTensor, grad: torch.Tensor) -> torch.Tensor:
    """Computes the gradients of the per-sample weights of `given`.

    Each is the product of the lookup's row in `tables` and the gradient of its bag.
    """
    bag = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    samples, dims = len(LENGTHS) // 2, [table.shape[1] for table in tables]
    grads = grad.cpu().split(dims, dim=1)
    parts = [
        (tables[feature][i].double() * grads[feature][b % samples].double()).sum()
        for feature, b, i in zip((bag // samples).tolist(), bag.tolist(), given.values().tolist(), strict=True)
    ]
    return torch.stack(parts).float()


def collection_of(device: torch.device, window: int = 1, dims: tuple[int, int] = (4, 8)) -> Any:
    tables = [bag_config(f"t{n}", [f"f{n}"], embedding_dim=dim) for n, dim in enumerate(dims)]
    return apply(bags_collection(device, *tables, is_weighted=True, cache=IDS), window=window)


def rows(collection: Any) -> list[torch.Tensor]:
    """Returns every row of both tables."""
    every = {key: [[i] for i in range(IDS)] for key in ("f0", "f1")}
    collection.eval()
    values = collection(jagged(every, {key: [[1.0]] * IDS for key in every}))
    collection.train()
    return [values[key].detach().cpu().clone() for key in every]


def assert_gradients(before: list[torch.Tensor], batches: Sequence[Any], grads: Sequence[torch.Tensor]) -> None:
    for given, grad in zip(batches, grads, strict=True):
        torch.testing.assert_close(given.weights().grad.cpu(), expected_grad(before, given, grad))


def grad_like(output: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(seed)).to(output.device)


CASES = pytest.mark.parametrize(
    ("window", "dims"), [(1, (4, 4)), (1, (4, 8)), (2, (4, 8)), (3, (4, 4))], ids=lambda v: str(v).replace(" ", "")
)


@CASES
@pytest.mark.parametrize("order", [(0, 1), (1, 0), None])
def test_two_forwards_then_their_backwards(
    device: torch.device, window: int, dims: tuple[int, int], order: tuple[int, int] | None
) -> None:
    """Each backward pass uses the rows of its own forward, in either order, or with both outputs in one loss."""
    collection = collection_of(device, window, dims)
    for seed in range(3):  # at any position in an accumulation window
        before = rows(collection)
        batches = [batch(2 * seed, device), batch(2 * seed + 1, device)]
        outputs = [collection(b).values() for b in batches]
        if order is None:
            grads = [2 * outputs[1].detach(), 2 * outputs[0].detach()]
            (2 * outputs[0] * outputs[1]).sum().backward()
        else:
            grads = [grad_like(output, seed) for output in outputs]
            for index in order:
                outputs[index].backward(grads[index])
        assert_gradients(before, batches, grads)


@pytest.mark.parametrize("between", ["updates", "a load"])
def test_what_happens_between_forward_and_backward(device: torch.device, between: str) -> None:
    """Several updates may run between forward and backward; the rows stay cached until the backward pass."""
    collection = collection_of(device)
    before, waiting = rows(collection), batch(0, device)
    output = collection(waiting).values()
    if between == "updates":
        train(collection, [batch(seed, device) for seed in range(1, 4)])
    else:
        state = collection.state_dict().items()
        collection.load_state_dict({key: value.clone() if key.endswith("ids") else value + 1 for key, value in state})
    grad = grad_like(output, 0)
    output.backward(grad)
    assert_gradients(before, [waiting], [grad])


def embedding(device: torch.device) -> TableBatchedEmbedding:
    tables = [TableConfig(name, 20, dim, pooling=pool) for name, dim, pool in TABLES]
    return embedding_of(*tables, optimizer=(torch.optim.SGD, {"lr": 0.5}), cache=IDS, device=device)


TABLES = [("a", 4, Pooling.SUM), ("b", 8, Pooling.SUM), ("c", 4, Pooling.MEAN)]


def strided(weights: torch.Tensor) -> torch.Tensor:
    return torch.stack([weights, weights + 1], dim=1)[:, 0]


FORMS = {
    "float64": torch.Tensor.double,
    "float16": torch.Tensor.half,
    "bfloat16": torch.Tensor.bfloat16,
    "strided": strided,
    "expanded": lambda weights: weights[:1].expand(len(weights)),
    "strided float64": lambda weights: strided(weights.double()),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_weights_of_any_form(device: torch.device, form: str, mode: str) -> None:
    """Other shapes and dtypes behave like float32 weights `[n]` with the same values; gradients have the
    weights' dtype.
    """
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, IDS, 12))
    offsets = torch.tensor([0, 3, 4, 4, 8, 9, 12])
    ours = embedding(device).train(mode == "train")
    plain = copy.deepcopy(ours)
    drawn = torch.randn(12, generator=torch.Generator().manual_seed(1)).to(device)
    given = FORMS[form](drawn).detach().requires_grad_()
    flat = given.detach().float().contiguous().clone().requires_grad_()
    for _ in range(2):
        output, expected = ours(ids, offsets, given), plain(ids, offsets, flat)
        assert output.dtype == torch.float32
        assert torch.equal(output, expected)
        if mode == "train":
            output.square().sum().backward()
            expected.square().sum().backward()
    if mode == "train":
        assert given.grad is not None
        assert flat.grad is not None
        assert given.grad.dtype == given.dtype
        torch.testing.assert_close(
            given.grad.float(), flat.grad, rtol=1e-6 if given.dtype.itemsize > 2 else 2e-2, atol=1e-6
        )
    every = torch.arange(IDS).repeat(3), torch.arange(3 * IDS + 1)
    assert torch.equal(ours.eval()(*every), plain.eval()(*every))
