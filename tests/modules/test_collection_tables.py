"""Configs, parameters, state dicts, copies and conversions of collections; loading TorchRec's weights and tables of
other sizes.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import jagged, numbered
from collection_factory import (
    EACH_KIND,
    Kind,
    Model,
    apply,
    bag_config,
    bags_collection,
    index_bag_config,
    sequence_config,
    sequences_collection,
)
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.modules.embedding_configs import DataType
from torchrec.optim import RowWiseAdagrad
from training import assert_trains, differing_tensors, equal_rows, read, rows_of, state_of, train_step

import rec_sdk_torch as rst


@EACH_KIND
def test_configs_stay_as_they_are(device: torch.device, kind: Kind) -> None:
    configs = [kind.config(), kind.index("plain", ())]
    # TorchRec's default init_fn is a functools.partial, which does not compare equal to its own copy
    before = repr(configs)
    train_step(apply(kind.collection(device, *configs, cache=5)), jagged({"f0": [[1]], "plain": [[2]]}))
    assert repr(configs) == before
    assert configs[1].feature_names == []
    assert configs[0].init_fn is None


BATCH = jagged({"f0": [[1, -8], [5]], "f1": [[0], [3, 8]]})


def model_of(device: torch.device, **options: Any) -> Model:
    """Builds a model with a hash table, an index table, and a dense layer."""
    return Model(device, bag_config(), index_bag_config("t1", ["f1"], num_embeddings=9, embedding_dim=3), **options)


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


def test_parameters_are_handles(device: torch.device) -> None:
    model = model_of(device)
    names = ["tables.embedding_bags.t0.weight", "tables.embedding_bags.t1.weight", "dense.weight", "dense.bias"]
    assert [name for name, _ in model.named_parameters()] == names
    handles = list(model.tables.parameters())
    assert [tuple(h.shape) for h in handles] == [(0, 4), (0, 3)]
    for handle in handles:
        assert isinstance(handle, torch.nn.Parameter)
        assert handle.requires_grad
        assert handle.is_leaf
        assert handle.device.type == device.type
    assert [n for n, _ in sequences_collection(device).named_parameters()] == ["embeddings.t0.weight"]
    assert [(name, len(ids)) for name, ids in model.named_buffers()] == [("tables.embedding_bags.t0.ids", 0)]
    assert model.tables.requires_grad_(True) is model.tables
    output = model(BATCH)
    leaves = {id(leaf) for leaf in graph_leaves(output)}
    assert leaves >= {id(parameter) for parameter in model.dense.parameters()}
    assert leaves.isdisjoint(map(id, handles)), "a backward pass executes a node for each leaf"
    output.sum().backward()
    assert all(handle.grad is None for handle in handles)


def test_inside_a_larger_module(device: torch.device) -> None:
    model = model_of(device)
    optimizer = torch.optim.SGD(model.dense.parameters(), lr=0.1)
    model(BATCH).sum().backward()
    optimizer.step()
    state, prefix = model.state_dict(), "tables.embedding_bags"
    tables = {f"{prefix}.t0.ids", f"{prefix}.t0.weight", f"{prefix}.t1.weight"}
    assert set(state) == {*tables, "dense.weight", "dense.bias"}
    assert state[f"{prefix}.t0.ids"].tolist() == [-8, 1, 5]
    assert state[f"{prefix}.t0.ids"].dtype == torch.int64
    assert [tuple(state[f"{prefix}.{t}.weight"].shape) for t in ("t0", "t1")] == [(3, 4), (9, 3)]
    assert not model.eval().tables.training
    before = model(BATCH)
    assert model.train().tables.training
    other = model_of(device, seed=9, cache=5)
    assert other.load_state_dict(state).missing_keys == []
    assert torch.equal(other.eval()(BATCH), before)
    assert not list(differing_tensors(state, other.state_dict()))


def test_loading_is_strict(device: torch.device) -> None:
    collection = apply(bags_collection(device, bag_config(), bag_config("t1", ["f1"])))
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
            "ids are duplicates",
        ),
    ]
    for given, message in wrong:
        with pytest.raises(RuntimeError, match=message):
            collection.load_state_dict(given)
        assert not list(differing_tensors(state, collection.state_dict())), message
    result = collection.load_state_dict(wrong[0][0], strict=False)
    assert result.missing_keys == [f"{prefix}.weight"]
    index = bags_collection(device, index_bag_config("t0", (), num_embeddings=9, embedding_dim=3))
    with pytest.raises(RuntimeError, match=r"\(8, 2\).*\(9, 3\)"):
        index.load_state_dict({f"{prefix}.weight": torch.zeros(8, 2)})


@pytest.mark.parametrize("key", ["other", "embedding_bags.other", "embedding_bags.t9.weight", "embedding_bags.t0.bias"])
@pytest.mark.parametrize("prefix", ["", "0.", "0.tables."])
def test_unexpected_keys_are_listed_once(device: torch.device, prefix: str, key: str) -> None:
    model: torch.nn.Module = apply(bags_collection(device))
    train_step(model, numbered(1))
    for name in reversed(prefix.split(".")[:-1]):
        model = torch.nn.ModuleDict({name: model})
    state = {name: value + 1 for name, value in model.state_dict().items()}
    result = model.load_state_dict({**state, f"{prefix}{key}": torch.zeros(1)}, strict=False)
    assert result == ([], [f"{prefix}{key}"])
    assert not list(differing_tensors(state, model.state_dict()))


def test_a_deepcopy_trains_identically_and_independently(device: torch.device) -> None:
    model = model_of(device, cache=6, optimizer=torch.optim.Adam)
    for _ in range(2):
        model(BATCH).sum().backward()
    twin = copy.deepcopy(model)
    state = state_of(model.tables)
    batch = jagged({"f0": [[1, 90], [5]], "f1": [[0], [3, 7]]})
    twin(batch).sum().backward()
    assert not list(differing_tensors(state, state_of(model.tables)))
    assert list(differing_tensors(state, state_of(twin.tables)))
    twin.tables.fused_optimizer.param_groups[0]["lr"] = 9.0
    model(batch).sum().backward()
    assert not list(differing_tensors(model.state_dict(), twin.state_dict()))
    assert model.tables.fused_optimizer.param_groups[0]["lr"] == 0.5
    handle, copied = next(model.tables.parameters()), next(twin.tables.parameters())
    assert handle is not copied
    assert next(iter(twin.tables.fused_optimizer.params.values())) is copied


def test_deepcopy_before_use(device: torch.device) -> None:
    collection = bags_collection(device)
    twin = copy.deepcopy(collection)
    third = copy.deepcopy(apply(collection))
    apply(twin, lr=2.0)
    for module in (twin, third):
        assert torch.equal(read(collection, numbered(4)), read(module, numbered(4)))
    assert_trains(third)
    assert_trains(collection)
    assert_trains(twin, lr=2.0)


def test_conversions(device: torch.device) -> None:
    model = model_of(device)
    model(BATCH).sum().backward()
    tables, before = model.tables, model.tables.state_dict()
    for convert in (tables.half, tables.double, tables.bfloat16, lambda: tables.to(torch.bfloat16)):
        with pytest.raises(RuntimeError, match=r"cannot be converted to torch\.\w+: set the data type"):
            convert()
        assert {p.dtype for p in tables.parameters()} == {torch.float32}
    for same in (model.float, lambda: model.to("cpu"), lambda: model.to(device), lambda: model.to(torch.float32)):
        assert same() is model
    model.to(device)
    assert not list(differing_tensors(before, tables.state_dict()))
    model(BATCH).sum().backward()
    assert list(differing_tensors(before, tables.state_dict()))


def test_from_meta_to_a_device(device: torch.device) -> None:
    """This is TorchRec's deferred initialization; optimizers that were applied before it remain."""
    model = model_of(torch.device("meta"))
    with pytest.raises(NotImplementedError, match="meta tensor"):
        model.to(device)
    tables = model.to_empty(device=device).tables
    assert tables.device.type == device.type
    assert [tuple(p.shape) for p in tables.parameters()] == [(0, 4), (0, 3)]
    assert all(p.device.type == device.type and p.requires_grad for p in tables.parameters())
    batch = jagged({"f0": [[1]], "f1": [[2]]})
    before = read(tables, batch)
    train_step(tables, batch)
    torch.testing.assert_close(before - read(tables, batch), torch.full((1, 7), 0.5))


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
    config = index_bag_config("t1", (), num_embeddings=10**9, embedding_dim=4096)  # would need 16 TB
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


# ---- loading weights and states of TorchRec's tables, and of tables of another size


KEY = "embedding_bags.t0.weight"


def plain(rows: int) -> EmbeddingBagConfig:
    return index_bag_config(num_embeddings=rows)


def test_weights_of_torchrec_load_into_a_hash_table(device: torch.device) -> None:
    """The weights have no ids: row i belongs to id i."""
    theirs = EmbeddingBagCollection(tables=[plain(12)])
    ours = apply(bags_collection(device, bag_config()))
    train_step(ours, jagged({"f0": [[-5, 700]]}))
    ours.load_state_dict(theirs.state_dict())
    found = ours.state_dict()
    assert found["embedding_bags.t0.ids"].tolist() == list(range(12))
    assert torch.equal(found[KEY], theirs.state_dict()[KEY])
    batch = jagged({"f0": [[0, 11], [3]]})
    assert torch.equal(ours(batch).values().detach().cpu(), theirs(batch).values().detach())


@pytest.mark.parametrize("rows", [6, 15])
def test_index_tables_take_the_rows_that_fit(device: torch.device, rows: int) -> None:
    ours = bags_collection(device, plain(9))
    before = ours.state_dict()[KEY]
    given = torch.arange(rows * 4.0).reshape(rows, 4)
    message = f"'t0' has num_embeddings 9, what is loaded {rows}: {min(9, rows)} rows are loaded, the others "
    with pytest.warns(UserWarning, match=message + ("stay as they are" if rows < 9 else "are left out")):
        ours.load_state_dict({KEY: given})
    found = ours.state_dict()[KEY]
    both = min(9, rows)
    assert torch.equal(found[:both], given[:both])
    assert torch.equal(found[both:], before[both:])


def test_a_save_of_a_smaller_index_table_is_loaded(device: torch.device, tmp_path: Path) -> None:
    small, large = bags_collection(device, plain(6)), bags_collection(device, plain(9))
    for each in (small, large):
        apply(each, torch.optim.Adagrad)
    train_step(small, jagged({"f0": [[1, 5]]}))
    rst.Saver().save(small, str(tmp_path))
    with pytest.warns(UserWarning, match="6 rows are loaded"):
        rst.Saver().load(large, str(tmp_path))
    assert torch.equal(large.state_dict()[KEY][:6], small.state_dict()[KEY])
    states = [each.fused_optimizer.state_dict()["state"][KEY]["t0.momentum1"] for each in (large, small)]
    assert torch.equal(states[0][:6], states[1])


@pytest.mark.parametrize("cls", [torch.optim.Adagrad, RowWiseAdagrad])
@pytest.mark.parametrize("hashed", [False, True])
def test_states_load_without_ids_and_step(device: torch.device, cls: type, hashed: bool) -> None:
    ours = apply(bags_collection(device, bag_config() if hashed else plain(12)), cls)
    ours.load_state_dict({KEY: torch.zeros(12, 4)})
    train_step(ours, jagged({"f0": [[1]]}))
    state = torch.arange(12.0) if cls is RowWiseAdagrad else torch.arange(48.0).reshape(12, 4)
    ours.fused_optimizer.load_state_dict({"state": {KEY: {"t0.momentum1": state}}})
    found = ours.fused_optimizer.state_dict()["state"][KEY]
    assert torch.equal(found["t0.momentum1"], state)
    assert found["t0.step"] == 1, "it stays as it was"
    if not hashed:
        with pytest.warns(UserWarning, match="5 rows are loaded"):
            ours.fused_optimizer.load_state_dict({"state": {KEY: {"t0.momentum1": state[:5] + 1}}})


def test_a_step_that_the_formula_uses_must_be_there(device: torch.device) -> None:
    for cls, options in ((torch.optim.Adam, {}), (torch.optim.Adagrad, {"lr_decay": 0.1})):
        ours = apply(bags_collection(device, plain(12)), cls, **options)
        train_step(ours, jagged({"f0": [[1]]}))
        state = ours.fused_optimizer.state_dict()
        del state["state"][KEY]["t0.step"]
        with pytest.raises(ValueError, match=r"missing are \['t0\.step'\]"):
            ours.fused_optimizer.load_state_dict(state)


@pytest.mark.parametrize("hashed", [False, True])
def test_reset_parameters_draws_anew(device: torch.device, hashed: bool) -> None:
    collection, fresh = (bags_collection(device, bag_config() if hashed else plain(12)) for _ in "ab")
    for each in (collection, fresh):
        each.reset_parameters()  # no row has been allocated yet
        apply(each, torch.optim.Adagrad)
    batch = jagged({"f0": [[1, 7], [3]]})
    for _ in range(3):
        train_step(collection, batch)
    collection.reset_parameters()
    assert len(collection.table_ids("t0")) == (0 if hashed else 12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(train_step(collection, batch), train_step(fresh, batch))
    assert equal_rows(rows_of(collection), rows_of(fresh))


def test_reset_parameters_calls_init_fn(device: torch.device) -> None:
    collection = bags_collection(device, index_bag_config(init_fn=torch.nn.init.uniform_))
    before = collection.state_dict()[KEY]
    collection.reset_parameters()
    after = collection.state_dict()[KEY]
    assert not torch.equal(before, after)
    assert (after >= 0).all()
    assert after.unique().numel() == after.numel()
