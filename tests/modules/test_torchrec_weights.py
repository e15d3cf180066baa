"""Weights and states of TorchRec's tables, and of tables of another size, are loaded."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from jagged import apply, bag_config, bags_collection, jagged, rows_of, train_step
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.optim import RowWiseAdagrad

import rec_sdk_torch as rst

KEY = "embedding_bags.t0.weight"


def plain(rows: int) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(num_embeddings=rows, embedding_dim=4, name="t0", feature_names=["f0"])


def test_weights_of_torchrec_load_into_a_hash_table(device: torch.device) -> None:
    """They come without ids: row i is that of the id i."""
    theirs = EmbeddingBagCollection(tables=[plain(12)])
    ours = bags_collection(device, bag_config())
    apply(ours)
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
    told = f"'t0' has num_embeddings 9, what is loaded {rows}: {min(9, rows)} rows are loaded, the others "
    with pytest.warns(UserWarning, match=told + ("stay as they are" if rows < 9 else "are left out")):
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
    ours = bags_collection(device, bag_config() if hashed else plain(12))
    apply(ours, cls)
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
        ours = bags_collection(device, plain(12))
        apply(ours, cls, **options)
        train_step(ours, jagged({"f0": [[1]]}))
        state = ours.fused_optimizer.state_dict()
        del state["state"][KEY]["t0.step"]
        with pytest.raises(ValueError, match=r"missing are \['t0\.step'\]"):
            ours.fused_optimizer.load_state_dict(state)


@pytest.mark.parametrize("hashed", [False, True])
def test_reset_parameters_draws_anew(device: torch.device, hashed: bool) -> None:
    collection, fresh = (bags_collection(device, bag_config() if hashed else plain(12)) for _ in "ab")
    for each in (collection, fresh):
        each.reset_parameters()  # of nothing
        apply(each, torch.optim.Adagrad)
    batch = jagged({"f0": [[1, 7], [3]]})
    for _ in range(3):
        train_step(collection, batch)
    collection.reset_parameters()
    assert len(collection.table_ids("t0")) == (0 if hashed else 12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(train_step(collection, batch), train_step(fresh, batch))
    ours, theirs = rows_of(collection), rows_of(fresh)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(row, theirs[i]) for i, row in ours.items())


def test_reset_parameters_calls_init_fn(device: torch.device) -> None:
    config = plain(12)
    config.init_fn = torch.nn.init.uniform_
    collection = bags_collection(device, config)
    before = collection.state_dict()[KEY]
    collection.reset_parameters()
    after = collection.state_dict()[KEY]
    assert not torch.equal(before, after)
    assert (after >= 0).all()
    assert after.unique().numel() == after.numel()
