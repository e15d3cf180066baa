"""Victims of the cache are written back to the host store asynchronously, which must not affect any result."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from embeddings import embedding_of, one_table, weights_of, windowed

from rec_sdk_torch import _engine
from rec_sdk_torch.operators.devices import backends
from rec_sdk_torch.tbe import Pooling, TableBatchedEmbedding, TableConfig
from rec_sdk_torch.tbe.cache.batch import Batch

DIM = 4


@pytest.fixture(autouse=True, params=["staged", "direct"])
def copy_method(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets whether rows are copied through staging buffers, or directly by kernels."""
    if device.type == "npu" and request.param == "direct":
        pytest.skip("an NPU's kernels do not reach host memory")
    backend = backends._BACKENDS[device.type]
    monkeypatch.setitem(backends._BACKENDS, device.type, dataclasses.replace(backend, reaches_host=True))
    monkeypatch.setenv("EMBCACHE_DIRECT_SWAP", str(int(request.param == "direct")))


def make(
    device: torch.device, window: int = 1, fill: Callable[[torch.Tensor], None] = torch.nn.init.zeros_
) -> TableBatchedEmbedding:
    """Builds a hash table with a cache of two rows. Rows are initialized to 0, and every update subtracts 1."""
    options = {"optimizer": windowed("SGD", window, lr=1.0), "pooling": Pooling.NONE, "init_fn": fill, "cache": 2}
    return one_table(device, rows=50, dim=DIM, **options)


def step(embedding: TableBatchedEmbedding, *ids: int) -> list[float]:
    rows = embedding(torch.tensor(ids), torch.tensor([0, len(ids)]))
    rows.backward(torch.ones_like(rows))
    return rows[:, 0].tolist()


def read(embedding: TableBatchedEmbedding, *ids: int) -> list[float]:
    with torch.no_grad():
        return embedding(torch.tensor(ids), torch.tensor([0, len(ids)]))[:, 0].tolist()


def read_chunks(embedding: TableBatchedEmbedding, *ids: int) -> list[float]:
    values: dict[int, float] = {}
    for chunk in embedding.view("t").chunks():
        values |= dict(zip(chunk.ids.tolist(), chunk.parts["weight"][:, 0].tolist(), strict=True))
    return [values[i] for i in ids]


def read_a_copy(embedding: TableBatchedEmbedding, *ids: int) -> list[float]:
    return read(copy.deepcopy(embedding), *ids)


def read_rows(embedding: TableBatchedEmbedding, *ids: int) -> list[float]:
    return weights_of(embedding, ids)[:, 0].tolist()


def read_after_relayout(embedding: TableBatchedEmbedding, *ids: int) -> list[float]:
    embedding.layout._rebuild()
    return read(embedding, *ids)


@pytest.mark.parametrize("look", [step, read, read_chunks, read_a_copy, read_rows, read_after_relayout])
def test_victims_are_read_before_their_write_back(look: Callable[..., list[float]], device: torch.device) -> None:
    embedding = make(device)
    step(embedding, 1, 2)
    step(embedding, 1, 2)
    step(embedding, 3)
    assert embedding.cache_stats()["rows_out"] == 1
    assert look(embedding, 1, 2) == [-2.0, -2.0]


def test_victims_can_be_written_and_removed(device: torch.device) -> None:
    embedding = make(device)
    step(embedding, 1, 2)
    step(embedding, 3, 4)
    view = embedding.view("t")
    view.write(torch.tensor([1]), {"weight": torch.full((1, DIM), 7.0)})
    assert read(embedding, 1, 2) == [7.0, -1.0]
    step(embedding, 5, 6)
    assert view.remove(view.ids()) == 6
    assert embedding.groups[0].engine.tables.memory()["store_bytes"] == 0
    assert step(embedding, 3, 4) == [0.0, 0.0]
    assert read(embedding, 5) == [0.0], "not what was on its way when the table was cleared"


@pytest.mark.parametrize("window", [1, 2])
def test_a_failed_swap_evicts_nothing(device: torch.device, window: int) -> None:
    failing = False

    def fill(weight: torch.Tensor) -> None:
        weight.zero_()
        if failing:
            raise OSError("planted")

    embedding = make(device, window, fill)
    step(embedding, 1, 2)
    failing = True
    with pytest.raises(OSError, match="planted"):
        step(embedding, 3, 4)
    failing = False
    assert embedding.groups[0].engine.tables.memory()["store_bytes"] == 0
    assert embedding.cache_stats()["rows_out"] == 0
    step(embedding, 1, 3)
    step(embedding, 4)
    assert embedding.cache_stats()["rows_out"] == 2
    step(embedding, 2, 3)
    assert read(embedding, 1, 2, 3, 4) == [-2.0, -2.0, -2.0, -1.0]


def test_a_plan_dropped_after_its_start_loses_nothing(device: torch.device) -> None:
    embedding = make(device)
    step(embedding, 1, 2)
    (group,) = embedding.groups
    ids = Batch.from_tensors(torch.tensor([3]), torch.tensor([0, 1]), 1, np.zeros(1, np.int64))
    plan = group.plan(ids)
    group.stage(plan)
    _engine.start_plans([plan.host])
    group.swap.drop(plan)
    assert read(embedding, 1, 2, 3) == [-1.0, -1.0, 0.0]


def test_setting_is_checked(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBCACHE_DIRECT_SWAP", "yes")
    with pytest.raises(ValueError, match="EMBCACHE_DIRECT_SWAP: expected 0 or 1, got 'yes'"):
        step(make(device), 1)


@pytest.mark.parametrize("chunk", [1, 100])
def test_a_window_updates_rows_that_were_victims_in_it(device: torch.device, chunk: int) -> None:
    embedding = make(device, window=3)
    window = embedding.groups[0].accumulation_buffer
    assert window is not None
    window._chunk = chunk
    for ids in (1, 2), (3, 4), (1, 3):
        step(embedding, *ids)
    assert step(embedding, 1, 4) == [-2.0, -1.0]
    step(embedding, 5, 6)
    assert read(embedding, 1, 2, 3, 4) == [-2.0, -1.0, -2.0, -1.0]
    step(embedding, 7)
    assert read(embedding, 1, 2, 3, 4, 5, 6, 7) == [-3.0, -1.0, -2.0, -2.0, -1.0, -1.0, -1.0]


def test_pending_gradients_are_fetched_beside_a_row_without_victim(device: torch.device) -> None:
    tables = [TableConfig(name, 50, DIM, pooling=Pooling.NONE, init_fn=torch.nn.init.zeros_) for name in "ab"]
    optimizer = windowed("SGD", 3, lr=1.0)
    embedding = embedding_of(*tables, optimizer=optimizer, cache={"a": 4, "b": 2}, device=device)
    for ids in ((1, 11, 12), (1, 13, 14), (2, 11, 15)):
        rows = embedding(torch.tensor(ids), torch.tensor([0, 1, 3]))
        rows.backward(torch.ones_like(rows))
    with torch.no_grad():
        rows = embedding(torch.tensor([1, 2, 11, 12, 13, 14, 15]), torch.tensor([0, 2, 7]))
    assert rows[:, 0].tolist() == [-2.0, -1.0, -2.0, -1.0, -1.0, -1.0, -1.0]


def test_an_interrupted_write_back_is_repeated(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = make(device)
    step(embedding, 1, 2)
    step(embedding, 3, 4)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_engine.Engine, "complete_write_back", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(embedding, 1, 2)
    assert step(embedding, 1, 2) == [-1.0, -1.0]
