"""Configs, parameters and state dicts, copies and conversions of collections."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from jagged import (
    apply,
    assert_trains,
    bag_config,
    bags_collection,
    jagged,
    numbered,
    random_bags,
    read,
    rows_of,
    same_bits,
    sequence_config,
    sequences_collection,
    train_step,
)
from torchrec import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_configs import DataType

import rec_sdk_torch as rst
from rec_sdk_torch import InitializerType


def test_configs_stay_as_they_are(device: torch.device) -> None:
    bags = [bag_config(), EmbeddingBagConfig(num_embeddings=9, embedding_dim=3, name="plain")]
    sequences = [sequence_config(is_incremental=False), EmbeddingConfig(num_embeddings=9, embedding_dim=4, name="p")]
    before = repr((bags, sequences))  # TorchRec's default init_fn, a partial, equals no copy of itself
    pooled = bags_collection(device, *bags, cache=5, batch_size=2)
    apply(pooled)
    train_step(pooled, jagged({"f0": [[1]], "plain": [[2]]}))
    apply(sequence := sequences_collection(device, *sequences))
    train_step(sequence, jagged({"f0": [[1]], "p": [[2]]}))
    assert repr((bags, sequences)) == before
    assert bags[1].feature_names == []
    assert bag_config().init_fn is None


# ---- parameters and state dicts


class Model(torch.nn.Module):
    def __init__(self, device: torch.device, **options: Any) -> None:
        super().__init__()
        index = EmbeddingBagConfig(num_embeddings=9, embedding_dim=3, name="t1", feature_names=["f1"])
        self.sparse = bags_collection(device, bag_config(), index, **options)
        self.dense = torch.nn.Linear(7, 1).to(device)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.dense(self.sparse(batch).values())


BATCH = jagged({"f0": [[1, -8], [5]], "f1": [[0], [3, 8]]})


def test_parameters_are_handles(device: torch.device) -> None:
    model = Model(device)
    names = ["sparse.embedding_bags.t0.weight", "sparse.embedding_bags.t1.weight", "dense.weight", "dense.bias"]
    assert [name for name, _ in model.named_parameters()] == names
    handles = list(model.sparse.parameters())
    assert [tuple(h.shape) for h in handles] == [(0, 4), (0, 3)]
    for handle in handles:
        assert isinstance(handle, torch.nn.Parameter)
        assert handle.requires_grad
        assert handle.is_leaf
        assert handle.device.type == device.type
    assert [n for n, _ in sequences_collection(device).named_parameters()] == ["embeddings.t0.weight"]
    assert [(name, len(ids)) for name, ids in model.named_buffers()] == [("sparse.embedding_bags.t0.ids", 0)]


def graph_leaves(output: torch.Tensor) -> list[torch.Tensor]:
    found, seen, todo = [], set(), [output.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        todo += [following for following, _ in node.next_functions]
    return found


def test_handles_are_leaves_without_a_gradient(device: torch.device) -> None:
    model = Model(device)
    apply(model.sparse)
    output = model(BATCH)
    leaves = graph_leaves(output)
    assert all(any(leaf is parameter for leaf in leaves) for parameter in model.parameters())
    output.sum().backward()
    assert all(handle.grad is None for handle in model.sparse.parameters())


def test_inside_a_larger_module(device: torch.device) -> None:
    model = Model(device)
    apply(model.sparse)
    optimizer = torch.optim.SGD(model.dense.parameters(), lr=0.1)
    model(BATCH).sum().backward()
    optimizer.step()
    state = model.state_dict()
    prefix = "sparse.embedding_bags"
    assert set(state) == {
        f"{prefix}.t0.ids",
        f"{prefix}.t0.weight",
        f"{prefix}.t1.weight",
        "dense.weight",
        "dense.bias",
    }
    assert state[f"{prefix}.t0.ids"].tolist() == [-8, 1, 5]
    assert state[f"{prefix}.t0.ids"].dtype == torch.int64
    assert [tuple(state[f"{prefix}.{t}.weight"].shape) for t in ("t0", "t1")] == [(3, 4), (9, 3)]
    assert not model.eval().sparse.training
    before = model(BATCH)
    assert model.train().sparse.training
    other = Model(device, seed=9, cache=5)
    assert other.load_state_dict(state).missing_keys == []
    assert torch.equal(other.eval()(BATCH), before)
    assert not list(same_bits(state, other.state_dict()))


def test_state_is_a_copy(device: torch.device) -> None:
    collection = bags_collection(device)
    apply(collection)
    train_step(collection, numbered(3))
    state = collection.state_dict()
    kept = copy.deepcopy(state)
    train_step(collection, numbered(3))
    assert not list(same_bits(state, kept))
    state["embedding_bags.t0.weight"].zero_()
    assert all(row.any() for row in rows_of(collection).values())


@pytest.mark.parametrize("sizes", [(4, 40), (40, 4)])
def test_loading_into_another_cache_size(device: torch.device, sizes: tuple[int, int]) -> None:
    """Trained on, both give the same bits; also when the reader already holds other rows."""
    rng = np.random.default_rng(0)
    source, target = (bags_collection(device, cache=size) for size in sizes)
    apply(source)
    apply(target)
    for _ in range(5):
        train_step(source, jagged(random_bags(rng, ["f0"], 12, batch_size=2, longest=2)))
        train_step(target, jagged(random_bags(rng, ["f0"], 90, batch_size=2, longest=2)))
    target.load_state_dict(source.state_dict())
    assert not list(same_bits(source.state_dict(), target.state_dict()))
    for _ in range(5):
        batch = jagged(random_bags(rng, ["f0"], 12, batch_size=2, longest=2))
        assert torch.equal(train_step(source, batch), train_step(target, batch))
    theirs, mine = rows_of(source), rows_of(target)
    assert theirs.keys() == mine.keys()
    assert all(torch.equal(row, mine[i]) for i, row in theirs.items())


def test_loading_is_strict(device: torch.device) -> None:
    collection = bags_collection(device, bag_config(), bag_config("t1", ["f1"]))
    apply(collection)
    train_step(collection, jagged({"f0": [[1]], "f1": [[2]]}))
    state = collection.state_dict()
    prefix = "embedding_bags.t0"
    other = {key: value + 1 for key, value in state.items()}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({k: v for k, v in state.items() if k != f"{prefix}.weight"}, r"Missing.*embedding_bags\.t0\.weight"),
        ({"embedding_bags.t1.weight": state["embedding_bags.t1.weight"]}, r"Missing.*embedding_bags\.t0\.ids"),
        ({**other, f"{prefix}.bias": torch.zeros(1)}, r"Unexpected.*embedding_bags\.t0\.bias"),
        ({**other, "embedding_bags.t9.weight": torch.zeros(1)}, r'Unexpected.*: "embedding_bags\.t9\.weight"\.'),
        ({**other, "other.weight": torch.zeros(1)}, r'Unexpected.*: "other\.weight"\.'),
        ({**state, f"{prefix}.weight": torch.zeros(1, 5)}, r"t0\.weight.*\(1, 5\).*\(1, 4\)"),
        ({**state, f"{prefix}.weight": torch.zeros(2, 4)}, r"t0\.weight.*\(2, 4\).*\(1, 4\)"),
        ({**state, f"{prefix}.ids": torch.zeros(1)}, "torch.float32.*torch.int64"),
        ({**state, f"{prefix}.ids": torch.tensor([[1]])}, r"ids.*\(1, 1\)"),
        (
            {**state, f"{prefix}.ids": torch.tensor([1, 1]), f"{prefix}.weight": torch.zeros(2, 4)},
            "ids are there twice",
        ),
    ]
    for given, message in wrong:
        with pytest.raises(RuntimeError, match=message):
            collection.load_state_dict(given)
        assert not list(same_bits(state, collection.state_dict())), message
    result = collection.load_state_dict(wrong[0][0], strict=False)
    assert result.missing_keys == [f"{prefix}.weight"]
    index = bags_collection(device, EmbeddingBagConfig(num_embeddings=9, embedding_dim=3, name="t0"))
    with pytest.raises(RuntimeError, match=r"\(8, 2\).*\(9, 3\)"):
        index.load_state_dict({f"{prefix}.weight": torch.zeros(8, 2)})


@pytest.mark.parametrize("key", ["other", "embedding_bags.other", "embedding_bags.t9.weight", "embedding_bags.t0.bias"])
@pytest.mark.parametrize("prefix", ["", "0.", "0.tables."])
def test_what_is_not_of_the_tables_is_listed_once(device: torch.device, prefix: str, key: str) -> None:
    collection = bags_collection(device)
    apply(collection)
    train_step(collection, jagged({"f0": [[1]]}))
    model: torch.nn.Module = collection
    for name in reversed(prefix.split(".")[:-1]):
        model = torch.nn.ModuleDict({name: model})
    state = {name: value + 1 for name, value in model.state_dict().items()}
    result = model.load_state_dict({**state, f"{prefix}{key}": torch.zeros(1)}, strict=False)
    assert result == ([], [f"{prefix}{key}"])
    assert not list(same_bits(state, model.state_dict()))


# ---- copies and conversions


def test_deepcopy_trains_alike_and_alone(device: torch.device) -> None:
    model = Model(device, cache=6)
    apply(model.sparse, torch.optim.Adam, lr=0.1)
    for _ in range(2):
        model(BATCH).sum().backward()
    twin = copy.deepcopy(model)
    state, optimizer = model.state_dict(), model.sparse.fused_optimizer.state_dict()["state"]
    batch = jagged({"f0": [[1, 90], [5]], "f1": [[0], [3, 7]]})
    twin(batch).sum().backward()
    assert not list(same_bits(state, model.state_dict()))
    assert not list(same_bits(optimizer, model.sparse.fused_optimizer.state_dict()["state"]))
    assert list(same_bits(state, twin.state_dict()))
    twin.sparse.fused_optimizer.param_groups[0]["lr"] = 9.0
    model(batch).sum().backward()
    assert not list(same_bits(model.state_dict(), twin.state_dict()))
    assert model.sparse.fused_optimizer.param_groups[0]["lr"] == 0.1
    handle, copied = next(model.sparse.parameters()), next(twin.sparse.parameters())
    assert handle is not copied
    assert next(iter(twin.sparse.fused_optimizer.params.values())) is copied


def test_deepcopy_before_use(device: torch.device) -> None:
    collection = bags_collection(device, bag_config(initializer_type=InitializerType.UNIFORM))
    twin = copy.deepcopy(collection)
    apply(collection)
    third = copy.deepcopy(collection)
    apply(twin, lr=2.0)
    for module in (twin, third):
        assert torch.equal(read(collection, numbered(4)), read(module, numbered(4)))
    assert_trains(third)
    assert_trains(collection)
    assert_trains(twin, lr=2.0)


def test_conversions(device: torch.device) -> None:
    model = Model(device)
    apply(model.sparse)
    model(BATCH).sum().backward()
    before = model.sparse.state_dict()
    for convert in (
        model.sparse.half,
        model.sparse.double,
        model.sparse.bfloat16,
        lambda: model.sparse.to(torch.bfloat16),
    ):
        with pytest.raises(RuntimeError, match=r"cannot be converted to torch\.\w+: set the data type"):
            convert()
        assert {p.dtype for p in model.sparse.parameters()} == {torch.float32}
    for convert in (model.float, lambda: model.to("cpu"), lambda: model.to(device), lambda: model.to(torch.float32)):
        assert convert() is model
    model.to(device)
    assert not list(same_bits(before, model.sparse.state_dict()))
    output = model(BATCH)
    output.sum().backward()
    assert list(same_bits(before, model.sparse.state_dict()))


def test_from_meta_to_a_device(device: torch.device) -> None:
    """As TorchRec's deferred initialisation does it; what was applied before holds."""
    model = Model(torch.device("meta"))
    apply(model.sparse, lr=0.25)
    with pytest.raises(NotImplementedError, match="meta tensor"):
        model.to(device)
    model.to_empty(device=device)
    assert model.sparse.device.type == device.type
    assert [tuple(p.shape) for p in model.sparse.parameters()] == [(0, 4), (0, 3)]
    assert all(p.device.type == device.type and p.requires_grad for p in model.sparse.parameters())
    batch = jagged({"f0": [[1]], "f1": [[2]]})
    before = read(model.sparse, batch)
    train_step(model.sparse, batch)
    torch.testing.assert_close(before - read(model.sparse, batch), torch.full((1, 7), 0.25))


def test_handles_keep_the_type_of_their_table(device: torch.device) -> None:
    collection = bags_collection(device, bag_config(data_type=DataType.BF16))
    assert [p.dtype for p in collection.float().parameters()] == [torch.bfloat16]
    with pytest.raises(RuntimeError, match="cannot be converted"):
        collection.half()
    assert [p.dtype for p in collection.parameters()] == [torch.bfloat16]


def test_pickling_is_refused() -> None:
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(bags_collection(torch.device("cpu")))


def test_meta_device_allocates_nothing() -> None:
    config = EmbeddingBagConfig(num_embeddings=10**9, embedding_dim=4096, name="t1")  # 16 TB
    collection = bags_collection(torch.device("meta"), bag_config(), config)
    assert [p.device.type for p in collection.parameters()] == ["meta", "meta"]
    assert [tuple(p.shape) for p in collection.parameters()] == [(0, 4), (0, 4096)]
    assert collection.device.type == "meta"
    state = collection.state_dict()
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "embedding_bags.t0.ids": (0,),
        "embedding_bags.t0.weight": (0, 4),
        "embedding_bags.t1.weight": (10**9, 4096),
    }
    assert {value.device.type for value in state.values()} == {"meta"}
    for training in (True, False):
        collection.train(training)
        with pytest.raises(RuntimeError, match="meta"):
            collection(jagged({"f0": [[1]], "t1": [[2]]}))
    assert rst.EmbCacheEmbeddingCollection([sequence_config()], device="meta").device == torch.device("meta")


def test_a_handle_is_a_parameter_without_rows(device: torch.device) -> None:
    collection = bags_collection(device)
    handle = next(collection.parameters())
    assert collection.requires_grad_(True) is collection
    assert handle.requires_grad
