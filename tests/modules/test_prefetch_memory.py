"""Loops that prefetch and leave no plan behind: the memory of rows on their way stays that of a few batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from jagged import apply, bag_config, bags_collection, jagged, sequence_config, sequences_collection
from torchrec import KeyedJaggedTensor

import rec_sdk_torch as rst
from rec_sdk_torch.fbgemm import ComputeDevice, EmbeddingLocation, SplitTableBatchedEmbeddingBagsCodegen

SIZE = 16
ROW = 16 + 16
"""Bytes of a record: four weights, and Adagrad's sums."""

BATCHES = 30


def batches(count: int = BATCHES) -> Iterator[KeyedJaggedTensor]:
    """Rows that the cache does not have."""
    for step in range(count):
        yield jagged({"f0": [[SIZE * step + i] for i in range(SIZE)]})


def collection(device: torch.device, kind: str, policy: str) -> Any:
    options = {"cache": 500, "cache_policy": policy}
    if kind == "bags":
        tables: Any = bags_collection(device, bag_config("t0", num_embeddings=5000), **options)
    else:
        tables = sequences_collection(device, sequence_config("t0", num_embeddings=5000), **options)
    apply(tables, torch.optim.Adagrad, lr=0.1)
    return tables


def look_up(tables: Any, batch: KeyedJaggedTensor) -> torch.Tensor:
    output = tables(batch)
    values: torch.Tensor = (output["f0"] if isinstance(output, dict) else output).values()
    return values


def train(tables: Any, batch: KeyedJaggedTensor) -> None:
    look_up(tables, batch).sum().backward()


def read(tables: Any, batch: KeyedJaggedTensor) -> None:
    with torch.no_grad():
        look_up(tables, batch)


def evaluate(tables: Any, batch: KeyedJaggedTensor) -> None:
    tables.eval()
    look_up(tables, batch)
    tables.train()


def leave(tables: Any, batch: KeyedJaggedTensor) -> None:
    look_up(tables, batch)


def train_another(tables: Any, batch: KeyedJaggedTensor) -> None:
    """As a model that changes ids before it looks them up."""
    train(tables, KeyedJaggedTensor(batch.keys(), batch.values() + 2000, lengths=batch.lengths()))


def skip(tables: Any, batch: KeyedJaggedTensor) -> None:
    if int(batch.values()[0]) % (2 * SIZE):
        train(tables, batch)


def look(tables: Any, batch: KeyedJaggedTensor) -> None:
    train(tables, batch)
    tables.state_dict()


LOOPS: dict[str, Callable[[Any, KeyedJaggedTensor], None]] = {
    each.__name__: each for each in (train, read, evaluate, leave, train_another, skip, look)
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(("kind", "policy"), [("bags", "lrfu"), ("sequences", "look_ahead")])
def test_a_loop_keeps_no_staged_rows(device: torch.device, loop: str, kind: str, policy: str) -> None:
    tables, depth = collection(device, kind, policy), 2
    train(tables, next(batches()))
    most = 0
    for batch in rst.prefetch(batches(), tables, depth):
        tables.wait_for_plans()
        most = max(most, tables.memory_report()["staging"])
        LOOPS[loop](tables, batch)
    assert most <= 2 * 8 * SIZE * ROW + 8 * 4096, "rows that come and that leave, and arrays, of a few batches"
    tables.state_dict()  # what has left lands
    assert tables.memory_report()["staging"] == 0


@pytest.mark.parametrize("ended", ["read", "closed"])
def test_a_loop_that_is_left(device: torch.device, ended: str) -> None:
    tables = collection(device, "bags", "lrfu")
    train(tables, next(batches()))
    coming: Any = rst.prefetch(batches(), tables, 4)
    next(coming)
    tables.wait_for_plans()
    assert tables.memory_report()["staging"] > 0
    if ended == "closed":
        coming.close()
    else:
        tables.forget()
    assert tables.memory_report()["staging"] == 0


def test_fbgemms_prefetch(device: torch.device) -> None:
    place = (EmbeddingLocation.MANAGED_CACHING, ComputeDevice.CPU if device.type == "cpu" else ComputeDevice.CUDA)
    module = SplitTableBatchedEmbeddingBagsCodegen([(5000, 4, *place)], device=device, cache_load_factor=0.1)
    arguments = [(torch.arange(SIZE) + SIZE * step, torch.arange(SIZE + 1)) for step in range(BATCHES)]
    module(*arguments[0]).sum().backward()
    for batch in arguments[1:]:
        module.prefetch(*batch)
        module.tables.queue.wait()
        with torch.no_grad():
            module(*batch)
    assert module.tables.memory_report()["staging"] == 0
