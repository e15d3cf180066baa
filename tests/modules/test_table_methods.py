"""All modules with tables share one implementation of their methods; each method works on each module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import numbered
from collection_factory import apply, bag_config, bags_collection
from embeddings import embedding_of

import rec_sdk_torch as rst
from rec_sdk_torch.distributed.sharded import ShardedCollection
from rec_sdk_torch.fbgemm import ComputeDevice, EmbeddingLocation, OptimType, SplitTableBatchedEmbeddingBagsCodegen
from rec_sdk_torch.modules.collection import CachedCollection
from rec_sdk_torch.tbe.table_methods import TableMethods

METHODS = [name for name in vars(TableMethods) if not name.startswith("__")]
OVERRIDDEN: dict[type, set[str]] = {
    rst.TableBatchedEmbedding: set(),
    SplitTableBatchedEmbeddingBagsCodegen: {"sync_optimizers"},
    CachedCollection: {"sync_optimizers"},
    ShardedCollection: {"sync_optimizers", "put_back", "_title"},
}


@pytest.mark.parametrize("module", OVERRIDDEN, ids=lambda module: module.__name__)
def test_modules_have_one_body_of_each(module: type) -> None:
    assert {name for name in METHODS if getattr(module, name) is not vars(TableMethods)[name]} == OVERRIDDEN[module]


SGD_AT_HALF = (torch.optim.SGD, {"lr": 0.5})


def embedding(device: torch.device) -> Any:
    tables = embedding_of(rst.TableConfig("t", 100, 4), optimizer=SGD_AT_HALF, cache=10, device=device)
    return tables, lambda: tables(torch.tensor([1, 2]), torch.tensor([0, 2]))


def collection(device: torch.device) -> Any:
    tables = apply(bags_collection(device, bag_config("t", num_embeddings=100), cache=10))
    return tables, lambda: tables(numbered(2, 1)).values()


def fbgemm(device: torch.device) -> Any:
    host = (EmbeddingLocation.HOST, ComputeDevice.CPU)
    place = host if device.type == "cpu" else (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
    options = {"optimizer": OptimType.EXACT_SGD, "table_names": ["t"], "device": device, "learning_rate": 0.5}
    tables = SplitTableBatchedEmbeddingBagsCodegen([(100, 4, *place)], **options)
    return tables, lambda: tables(torch.tensor([1, 2]), torch.tensor([0, 2]))


@pytest.mark.parametrize("make", [embedding, collection, fbgemm])
def test_methods_act_on_the_tables_of_the_module(make: Any, device: torch.device) -> None:
    tables, lookup = make(device)
    lookup().sum().backward()
    assert tables.device == device
    assert tables.cache_stats("t")["unique_rows"] == 2
    ids = torch.tensor([1, 2])
    before = tables.view("t").read(ids).parts["weight"]
    tables.add_to_rows("t", ids, torch.ones(2, 4))
    tables.freeze("t")
    lookup()
    assert torch.equal(tables.view("t").read(ids).parts["weight"], before + 1)
    tables.thaw()
    lookup().sum().backward()
    assert torch.equal(tables.view("t").read(ids).parts["weight"], (before + 1) - 0.5)
    assert tables.clocks("t") == tables.embedding.view("t").clocks()
    assert "<th>t</th>" in tables._repr_html_()
    tables.reset_cache_stats()
    assert tables.cache_stats()["batches"] == 0
    assert make(device)[0].warm("t", ids) <= 2, "before the first batch"
    with pytest.raises(KeyError, match="no table is named 'no_such'"):
        tables.warm("no_such", ids)


def test_resident_tables_of_fbgemm_are_warmed_before_their_first_batch(device: torch.device) -> None:
    tables, _ = fbgemm(device)
    tables.warm("t", torch.tensor([5, 2]))
    tables.freeze()
    (weights,) = tables.split_embedding_weights()
    assert torch.equal(weights[[5, 2]].cpu(), tables.view("t").read(torch.tensor([5, 2])).parts["weight"])
