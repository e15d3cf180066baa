"""torch's own ways to save tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torchrec
from tables import contents, make, train
from torch.distributed.checkpoint.api import CheckpointException

import rec_sdk_torch as rst


def test_a_pickle_says_what_to_do_instead(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"rec_sdk_torch\.Saver\(\)\.save.*state_dict\(\)"):
        torch.save(torch.nn.Sequential(make()), tmp_path / "model.pt")


def read_back(path: Path) -> dict[str, torch.Tensor]:
    """`load` fills the tensors it is given, so those of hash tables come with the sizes of the save."""
    reader = dcp.FileSystemReader(path)
    sizes = reader.read_metadata().state_dict_metadata
    state = {key: torch.empty(each.size, dtype=each.properties.dtype) for key, each in sizes.items()}
    dcp.load(state, storage_reader=reader)
    return state


def test_torch_distributed_checkpoint(tmp_path: Path) -> None:
    """It saves and loads index and hash tables."""
    source, target = make(), make()
    train(source, range(5))
    dcp.save(source.state_dict(), checkpoint_id=tmp_path)
    target.load_state_dict(read_back(tmp_path))
    for name in "abcd":
        ids = source.view(name).ids().sort().values
        assert torch.equal(target.view(name).ids(), ids)
        assert torch.equal(target.view(name).read(ids).parts["weight"], source.view(name).read(ids).parts["weight"])
    assert contents(target).keys() == contents(source).keys()


def collection() -> torch.nn.Module:
    fields = {"num_embeddings": 40, "embedding_dim": 8}
    tables = [
        rst.EmbCacheEmbeddingBagConfig(name="hash", feature_names=["f0"], **fields),
        torchrec.EmbeddingBagConfig(name="index", feature_names=["f1"], **fields),
    ]
    model = torch.nn.ModuleDict({"tables": rst.EmbCacheEmbeddingBagCollection(tables=tables, cache=10)})
    rst.apply_optimizer_in_backward(torch.optim.Adagrad, model["tables"].parameters(), {"lr": 0.1})
    return model


def test_torch_distributed_checkpoint_of_collections(tmp_path: Path) -> None:
    source, target = collection(), collection()
    for step in range(5):
        ids = torch.from_numpy(np.random.default_rng(step).integers(0, 40, 12))
        batch = torchrec.KeyedJaggedTensor(["f0", "f1"], ids, lengths=torch.ones(12, dtype=torch.int32))
        source["tables"](batch).values().square().sum().backward()
    saved = source.state_dict()
    dcp.save(saved, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp.load(target.state_dict(), checkpoint_id=tmp_path)
    target.load_state_dict(read_back(tmp_path))
    found = target.state_dict()
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[key], value) for key, value in saved.items())
    assert len(saved["tables.embedding_bags.hash.ids"]) > 10
