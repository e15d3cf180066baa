"""Collections, compared with TorchRec's for the same weights, and bit by bit with `TableBatchedEmbedding`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from batches import jagged, random_bags, random_weights
from collection_factory import (
    apply,
    bag_config,
    bags_collection,
    index_bag_config,
    index_sequence_config,
    sequences_collection,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, PoolingType
from torchrec import KeyedJaggedTensor as Jagged
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface
from training import differing_tensors, output_values, train_step

from rec_sdk_torch.modules.configs import feature_names, table_config
from rec_sdk_torch.tbe import TableBatchedEmbedding, TableOptimizer

ROWS = 17
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def pooled_tables() -> list[EmbeddingBagConfig]:
    """Builds index tables of several dims and poolings, with shared features and several features per table."""
    rows = {"num_embeddings": ROWS}
    return [
        index_bag_config("a", ["f0", "f1"], **rows),
        index_bag_config("b", ["f1"], embedding_dim=7, pooling=PoolingType.MEAN, **rows),
        index_bag_config("c", ["f2", "f0"], **rows),
        index_bag_config("d", (), embedding_dim=1, **rows),
    ]


def sequence_tables() -> list[EmbeddingConfig]:
    fields = {"num_embeddings": ROWS, "embedding_dim": 6}
    return [index_sequence_config("a", ["f0", "f1"], **fields), index_sequence_config("b", ["f1", "f2"], **fields)]


PERMUTED = ("x", "d", "f2", "f0", "y", "f1", "z")
"""Keys in another order than the tables', with features that no table has."""


def pooled_pair(device: torch.device, **options: Any) -> tuple[torch.nn.Module, EmbeddingBagCollection]:
    """Builds this package's collection, with a small cache, and TorchRec's, both with the same weights."""
    theirs = EmbeddingBagCollection(tables=pooled_tables(), is_weighted=options.get("is_weighted", False))
    ours = bags_collection(device, *pooled_tables(), cache=ROWS, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def assert_same_pooled(ours: Any, theirs: Any) -> None:
    assert ours.keys() == theirs.keys()
    assert ours.length_per_key() == theirs.length_per_key()
    torch.testing.assert_close(ours.values().cpu(), theirs.values(), **CLOSE)
    for key in theirs.keys():  # noqa: SIM118 (a KeyedTensor)
        torch.testing.assert_close(ours[key].cpu(), theirs[key], **CLOSE)


def assert_same_weights(ours: torch.nn.Module, theirs: torch.nn.Module, close: dict[str, float] | None = None) -> None:
    actual, expected = ours.state_dict(), theirs.state_dict()
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, **(close or CLOSE), msg=lambda m, n=name: f"{n}: {m}")


def test_pooled_forward(device: torch.device) -> None:
    ours, theirs = pooled_pair(device)
    assert isinstance(ours, EmbeddingBagCollectionInterface)
    assert not ours.is_weighted()
    assert [c.name for c in ours.embedding_bag_configs()] == ["a", "b", "c", "d"]
    rng = np.random.default_rng(0)
    for keys in (("f0", "f1", "f2", "d"), ("d", "f2", "f1", "f0"), PERMUTED):
        batch = jagged(random_bags(rng, keys, ROWS, batch_size=9))
        ours.eval()
        assert_same_pooled(ours(batch), theirs(batch))
    other = EmbeddingBagCollection(tables=pooled_tables())
    assert not torch.equal(ours.state_dict()["embedding_bags.b.weight"], other.state_dict()["embedding_bags.b.weight"])
    other.load_state_dict(ours.state_dict())
    assert_same_weights(ours, other, {"rtol": 0.0, "atol": 0.0})


OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.3}),
    (torch.optim.Adagrad, {"lr": 0.2, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
]


@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS)
@pytest.mark.parametrize("weighted", [False, True])
def test_pooled_training(device: torch.device, optimizer: Any, options: dict[str, Any], weighted: bool) -> None:
    if weighted:  # torch's EmbeddingBag allows per-sample weights only with SUM
        tables = [t for t in pooled_tables() if t.pooling is PoolingType.SUM]
        theirs = EmbeddingBagCollection(tables=tables, is_weighted=True)
        ours: torch.nn.Module = bags_collection(device, *tables, cache=ROWS, is_weighted=True)
        ours.load_state_dict(theirs.state_dict())
    else:
        ours, theirs = pooled_pair(device)
    apply(ours, optimizer, **options)
    reference = optimizer(theirs.parameters(), **options)
    rng = np.random.default_rng(2)
    for _ in range(6):
        bags = random_bags(rng, PERMUTED, ROWS)
        our_batch = jagged(bags, random_weights(rng, bags) if weighted else None)
        # The weights are a leaf tensor, so that their gradients can be compared too.
        other = Jagged(
            our_batch.keys(),
            our_batch.values(),
            None if not weighted else our_batch.weights().clone(),
            our_batch.lengths(),
        )
        outputs, expected = [], []
        for module, batch, into in ((ours, our_batch, outputs), (theirs, other, expected)):
            if weighted:
                batch.weights().requires_grad_()
            into.append(module(batch))
        assert_same_pooled(outputs[0], expected[0])
        grad = torch.from_numpy(rng.normal(size=tuple(expected[0].values().shape)).astype(np.float32))
        outputs[0].values().backward(grad.to(device))
        reference.zero_grad()
        expected[0].values().backward(grad)
        reference.step()
        if weighted:
            torch.testing.assert_close(our_batch.weights().grad, other.weights().grad, rtol=1e-5, atol=1e-6)
            assert our_batch.weights().grad.abs().sum() > 0
    assert_same_weights(ours, theirs, {"rtol": 1e-5, "atol": 1e-6})


def test_weighted_mean_divides_by_length(device: torch.device) -> None:
    """FBGEMM divides the weighted sum by the length; TorchRec's EmbeddingBag refuses weights with MEAN."""
    ours = apply(bags_collection(device, bag_config(pooling=PoolingType.MEAN), is_weighted=True))
    rows = ours.eval()(jagged({"f0": [[7], [8]]}, {"f0": [[1.0], [1.0]]})).values().cpu()
    ours.train()
    batch = jagged({"f0": [[7, 8], []]}, {"f0": [[2.0, -1.0], []]})
    batch.weights().requires_grad_()
    output = ours(batch).values()
    torch.testing.assert_close(output.detach().cpu(), torch.stack([(2 * rows[0] - rows[1]) / 2, torch.zeros(4)]))
    output.sum().backward()
    torch.testing.assert_close(batch.weights().grad, rows.sum(dim=1) / 2)
    after = ours.state_dict()["embedding_bags.t0.weight"]
    torch.testing.assert_close(after, rows - 0.5 * torch.tensor([[1.0], [-0.5]]))


@pytest.mark.parametrize("need_indices", [False, True])
def test_sequence_forward(device: torch.device, need_indices: bool) -> None:
    theirs = EmbeddingCollection(tables=sequence_tables(), need_indices=need_indices)
    ours = sequences_collection(device, *sequence_tables(), cache=ROWS, need_indices=need_indices)
    assert isinstance(ours, EmbeddingCollectionInterface)
    assert ours.need_indices() is need_indices
    assert ours.embedding_dim() == 6
    assert ours.embedding_names_by_table() == theirs.embedding_names_by_table() == [["f0", "f1@a"], ["f1@b", "f2"]]
    ours.load_state_dict(theirs.state_dict())
    batch = jagged(random_bags(np.random.default_rng(3), PERMUTED, ROWS, batch_size=7))
    result, expected = ours.eval()(batch), theirs(batch)
    assert list(result) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(result[name].values().cpu(), value.values(), rtol=0, atol=0)
        assert result[name].lengths().tolist() == value.lengths().tolist()
        assert (result[name].weights_or_none() is not None) is need_indices
        if need_indices:
            assert result[name].weights().tolist() == value.weights().tolist()


@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS)
def test_sequence_training(device: torch.device, optimizer: Any, options: dict[str, Any]) -> None:
    theirs = EmbeddingCollection(tables=sequence_tables())
    ours = sequences_collection(device, *sequence_tables(), cache=ROWS)
    ours.load_state_dict(theirs.state_dict())
    apply(ours, optimizer, **options)
    reference = optimizer(theirs.parameters(), **options)
    rng = np.random.default_rng(4)
    for _ in range(6):
        batch = jagged(random_bags(rng, PERMUTED, ROWS))
        result, expected = ours(batch), theirs(batch)
        reference.zero_grad()
        for name, value in expected.items():
            factor = float(rng.normal())
            torch.testing.assert_close(result[name].values().cpu(), value.values(), **CLOSE)
            result[name] = (factor * result[name].values().square()).sum()
            expected[name] = (factor * value.values().square()).sum()
        sum(result.values()).backward()
        sum(expected.values()).backward()
        reference.step()
    assert_same_weights(ours, theirs, {"rtol": 1e-5, "atol": 1e-6})


def test_dims_and_data_types_in_one_collection(device: torch.device) -> None:
    types = (DataType.FP32, DataType.FP16, DataType.BF16, DataType.FP16)
    for make in (bags_collection, sequences_collection):
        kind = EmbeddingBagConfig if make is bags_collection else EmbeddingConfig
        tables = [
            kind(name=f"t{i}", num_embeddings=ROWS, embedding_dim=3 + 2 * (i % 3), feature_names=[f"f{i}"], data_type=t)
            for i, t in enumerate(types)
        ]
        ours = apply(make(device, *tables, cache=ROWS), lr=0.25)
        state = ours.state_dict()
        assert [v.dtype for v in state.values()] == [torch.float32, torch.float16, torch.bfloat16, torch.float16]
        ids = {f"f{i}": [[i, 2], [5]] for i in range(4)}
        output = ours(jagged(ids))
        loss = torch.zeros((), device=device)
        for i, weight in enumerate(state.values()):
            rows = weight.float()[[i, 2, 5]]
            part = output[f"f{i}"] if make is bags_collection else output[f"f{i}"].values()
            assert part.dtype == torch.float32
            expected = torch.stack([rows[:2].sum(0), rows[2]]) if make is bags_collection else rows
            torch.testing.assert_close(part.detach().cpu(), expected, **CLOSE)
            loss = loss + part.sum()
        loss.backward()
        for i, (name, weight) in enumerate(state.items()):
            expected = weight.float()
            for row in (i, 2, 5):  # one SGD step in float32, rounded once to the table's dtype
                expected[row] -= 0.25
            assert torch.equal(ours.state_dict()[name], expected.to(weight.dtype)), name
    with pytest.raises(ValueError, match=r"dims \[3, 5, 7\]"):
        ours.embedding_dim()


@pytest.mark.parametrize("training", [False, True])
def test_empty_batches_and_bags(device: torch.device, training: bool) -> None:
    for make, tables in ((bags_collection, pooled_tables()), (sequences_collection, sequence_tables())):
        ours = apply(make(device, *tables, cache=ROWS)).train(training)
        before = ours.state_dict()
        for samples in (0, 3):
            output = ours(jagged({key: [[]] * samples for key in PERMUTED}))
            if make is bags_collection:
                assert output.values().shape == (samples, sum(output.length_per_key()))
            else:
                assert {(tuple(o.values().shape), o.lengths().numel()) for o in output.values()} == {((0, 6), samples)}
            assert not output_values(output).any()
            if training:
                output_values(output).sum().backward()
        assert not list(differing_tensors(before, ours.state_dict()))


def test_int32_ids(device: torch.device) -> None:
    bags = random_bags(np.random.default_rng(5), PERMUTED, ROWS)
    ours, twin = (apply(bags_collection(device, *pooled_tables(), cache=ROWS)) for _ in range(2))
    for module, dtype in ((ours, torch.int32), (twin, torch.int64)):
        train_step(module, jagged(bags, dtype=dtype))
    assert not list(differing_tensors(ours.state_dict(), twin.state_dict()))


@st.composite
def random_models(draw: st.DrawFn) -> tuple[list[EmbeddingBagConfig], bool, int]:
    features = [f"f{i}" for i in range(4)]
    tables = []
    for index in range(draw(st.integers(1, 3))):
        fields = {
            "name": f"t{index}",
            "features": draw(st.lists(st.sampled_from(features), min_size=1, max_size=3, unique=True)),
            "num_embeddings": ROWS,
            "embedding_dim": draw(st.sampled_from((1, 4, 6))),
            "pooling": draw(st.sampled_from((PoolingType.SUM, PoolingType.MEAN))),
            "data_type": draw(st.sampled_from((DataType.FP32, DataType.BF16))),
        }
        tables.append((index_bag_config if draw(st.booleans()) else bag_config)(**fields))
    return tables, draw(st.booleans()), draw(st.integers(0, 2**32 - 1))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(model=random_models())
def test_same_bits_as_the_table_batched_embedding(
    device: torch.device, model: tuple[list[EmbeddingBagConfig], bool, int]
) -> None:
    tables, weighted, seed = model
    rng = np.random.default_rng(seed)
    ours = apply(bags_collection(device, *tables, seed=seed, is_weighted=weighted, cache=30), torch.optim.Adagrad)
    optimizer = TableOptimizer.create(torch.optim.Adagrad, {"lr": 0.5})
    configs = [table_config(t) for t in tables]
    below = TableBatchedEmbedding(configs, optimizer=optimizer, seed=seed, device=device, cache=30)
    keys = rng.permutation([f"f{i}" for i in range(5)]).tolist()
    order = [name for table in tables for name in feature_names(table)]
    for _ in range(3):
        bags = random_bags(rng, keys, ROWS, batch_size=int(rng.integers(0, 5)))
        weights = random_weights(rng, bags) if weighted else None
        output = ours(jagged(bags, weights)).values()
        lengths = [len(bag) for name in order for bag in bags[name]]
        flat = torch.tensor([i for name in order for bag in bags[name] for i in bag], dtype=torch.int64)
        scale = None
        if weights is not None:
            every = [w for name in order for bag in weights[name] for w in bag]
            scale = torch.tensor(every, dtype=torch.float32, device=device)
        expected = below(flat, torch.tensor([0, *np.cumsum(lengths, dtype=int)]), scale)
        assert torch.equal(output, expected)
        grad = torch.from_numpy(rng.normal(size=tuple(output.shape)).astype(np.float32)).to(device)
        output.backward(grad)
        expected.backward(grad)
    for name in (t.name for t in tables):
        assert ours.table_ids(name).tolist() == below.table_ids(name).tolist()
        state = ours.state_dict()[f"embedding_bags.{name}.weight"]
        assert torch.equal(state, below.state_dict()[f"{name}.weight"])
