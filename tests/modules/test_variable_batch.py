"""Keys with different batch sizes: results match TorchRec's collections; invalid batches raise errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from batches import expanded, jagged, variable_batch
from collection_factory import POOLED, SEQUENCE, Kind, apply, bag_config, bags_collection
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor, PoolingType
from training import assert_trains, output_values

import rec_sdk_torch as rst

KEYS = ("f0", "f1", "f2")
ROWS = 23


def configs(kind: Kind, weighted: bool = False) -> list[Any]:
    pooled = {"embedding_dim": 8} | ({} if weighted else {"pooling": PoolingType.MEAN}) if kind is POOLED else {}
    rows = {"num_embeddings": ROWS}
    return [kind.index("t0", ["f0", "f1"], **rows), kind.index("t1", ["f2", "f0"], **rows, **pooled)]


def both(kind: Kind, device: torch.device, weighted: bool = False) -> tuple[Any, Any]:
    """Builds this package's collection and TorchRec's, with the same weights."""
    options = {"is_weighted": weighted} if kind is POOLED else {}
    theirs: Any = (EmbeddingBagCollection if kind is POOLED else EmbeddingCollection)(
        configs(kind, weighted), **options
    )
    ours = kind.collection(device, *configs(kind, weighted), cache=ROWS - 2, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def assert_same_weights(ours: Any, theirs: Any) -> None:
    for name, weight in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name].cpu(), weight, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
def test_pooled_as_torchrec(device: torch.device, optimizer: type, weighted: bool, depth: int) -> None:
    ours, theirs = both(POOLED, device, weighted)
    options = {"lr": 0.1} | ({"eps": 1e-2} if optimizer is torch.optim.Adagrad else {})
    apply(ours, optimizer, **options)
    dense = optimizer(theirs.parameters(), **options)
    batches = [variable_batch(np.random.default_rng(seed), KEYS, ROWS, weighted) for seed in range(6)]
    for batch in rst.prefetch(iter(batches), ours, depth=depth) if depth else batches:
        output, expected = ours(batch), theirs(batch)
        assert output.keys() == expected.keys()
        torch.testing.assert_close(output.values().cpu(), expected.values(), rtol=1e-5, atol=1e-6)
        output.values().square().sum().backward()
        dense.zero_grad()
        expected.values().square().sum().backward()
        dense.step()
    assert_same_weights(ours, theirs)


def test_sequences_as_torchrec(device: torch.device) -> None:
    ours, theirs = both(SEQUENCE, device)
    apply(ours, lr=0.1)
    dense = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for seed in range(4):
        batch = variable_batch(np.random.default_rng(seed), KEYS, ROWS, inverse=seed % 2 == 0)
        output, expected = ours(batch), theirs(batch)
        assert output.keys() == expected.keys()
        for name, part in output.items():
            assert part.lengths().tolist() == expected[name].lengths().tolist()
            torch.testing.assert_close(part.values().cpu(), expected[name].values(), rtol=1e-5, atol=1e-6)
        dense.zero_grad()
        for each in (output, expected):
            output_values(each).square().sum().backward()
        dense.step()
    assert_same_weights(ours, theirs)


@pytest.mark.parametrize("training", [False, True])
def test_the_output_equals_the_expanded_batch(device: torch.device, training: bool) -> None:
    """Outputs are bit-identical to a batch that repeats each sample's bags explicitly, in evaluation too."""
    ours, _ = both(POOLED, device)
    apply(ours)
    ours.train(training)
    for seed in range(4):
        batch = variable_batch(np.random.default_rng(seed), KEYS, ROWS)
        assert torch.equal(ours(batch).values(), ours(expanded(batch)).values())


def test_equal_batch_sizes_need_no_inverse_indices(device: torch.device) -> None:
    ours, _ = both(POOLED, device)
    plain = jagged({key: [[1, 2], [3]] for key in KEYS})
    same = KeyedJaggedTensor(
        list(KEYS), plain.values(), lengths=plain.lengths(), stride_per_key_per_rank=[[2], [2], [2]]
    )
    with torch.no_grad():
        assert torch.equal(ours(same).values(), ours(plain).values())


def test_gradients_of_weights_in_evaluation(device: torch.device) -> None:
    ours, theirs = both(POOLED, device, weighted=True)
    ours.eval()
    theirs.eval()
    batch = variable_batch(np.random.default_rng(3), KEYS, ROWS, weighted=True)
    grads = []
    for collection in (ours, theirs):
        weights = batch.weights().clone().requires_grad_()
        given = KeyedJaggedTensor(
            batch.keys(),
            batch.values(),
            weights,
            batch.lengths(),
            stride_per_key_per_rank=batch.stride_per_key_per_rank(),
            inverse_indices=batch.inverse_indices(),
        )
        collection(given).values().square().sum().backward()
        grads.append(weights.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-6)
    assert all(torch.equal(ours.state_dict()[name].cpu(), weight) for name, weight in theirs.state_dict().items())


def test_errors(device: torch.device) -> None:
    collection = apply(bags_collection(device))
    ids, lengths, sizes = torch.tensor([1, 2, 3]), torch.tensor([1, 1, 1]), [[1], [2]]

    def batch(keys: list[str] | None = None, *shape: int) -> KeyedJaggedTensor:
        inverse = None if keys is None else (keys, torch.ones(shape, dtype=torch.int64))
        return KeyedJaggedTensor(
            ["f0", "x"], ids, lengths=lengths, stride_per_key_per_rank=sizes, inverse_indices=inverse
        )

    for given, message in (
        (batch(), r"batch sizes {'f0': 1, 'x': 2}: pooled outputs need inverse_indices"),
        (batch(["x"], 1, 3), r"expected .* keys \['f0'\]"),
        (batch(["f0"], 3), r"shape \(3,\)"),
        (batch(["f0", "x"], 1, 3), r"shape \(1, 3\)"),
    ):
        with pytest.raises(ValueError, match=message):
            collection(given)
    if device.type == "cpu":  # on other devices, an index out of range is found only when it is used
        with pytest.raises(IndexError, match="out of range"):
            collection(batch(["f0", "x"], 2, 3))
    lengths = lengths[:2]
    with pytest.raises(ValueError, match=r"2 lengths, 2 keys have batch sizes \[1, 2\]"):
        collection(batch())
    assert_trains(collection)


def test_click_labels_with_variable_batch_sizes(device: torch.device) -> None:
    clicks = rst.ShowClickParams(beta=1.0, admit_threshold=2.0)
    showclick = rst.AdmitAndEvictPolicyType.POLICY_SHOWCLICK
    rules = rst.AdmitAndEvictConfig(policy_type=showclick, showclick_params=clicks)
    collection = apply(bags_collection(device, bag_config(admit_and_evict_config=rules)))
    batch = variable_batch(np.random.default_rng(0), ["f0"], 9)
    rst.with_click_labels(batch, torch.ones(batch.stride(), dtype=torch.int64))
    with pytest.raises(NotImplementedError, match="click labels belong to samples"):
        collection(batch)
