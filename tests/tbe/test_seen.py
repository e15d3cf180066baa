"""`shows=`, `clicks=` and `timestamps=`: what does not fit is refused by name, and nothing is counted."""

from __future__ import annotations

import pytest
import torch

from rec_sdk_torch.rules import Age, ShowClick
from rec_sdk_torch.tbe import Pooling, TableBatchedEmbedding, TableConfig, TableLife, TableOptimizer

INT32, INT64 = 2**31 - 1, 2**63 - 1


def make(device: torch.device) -> TableBatchedEmbedding:
    life = TableLife(admission=ShowClick(10**12, beta=1), eviction=Age(10))
    table = TableConfig("t", 100, 4, pooling=Pooling.SUM, hashed=True, life=life)
    optimizer = TableOptimizer.create(torch.optim.SGD, {"lr": 0.1})
    return TableBatchedEmbedding([table], optimizer=optimizer, cache=50, device=device)


def train(embedding: TableBatchedEmbedding, **given: torch.Tensor) -> None:
    known = {"shows": torch.tensor([1, 1]), "clicks": torch.tensor([0, 0]), "timestamps": torch.tensor([5, 5])} | given
    embedding(torch.tensor([7, 8]), torch.tensor([0, 1, 2]), **known).sum().backward()


def counted(embedding: TableBatchedEmbedding) -> dict[str, list[int]]:
    ids, columns = embedding.view("t").candidates()
    return {"ids": ids.tolist()} | {name: values.tolist() for name, values in columns.items()}


@pytest.mark.parametrize(
    ("name", "value", "dtype", "allowed"),
    [
        ("shows", 2**32 + 1, torch.int64, f"1 to {INT32}"),
        ("shows", 2**31, torch.int64, f"1 to {INT32}"),
        ("shows", 0, torch.int32, f"1 to {INT32}"),
        ("shows", -4, torch.int8, f"1 to {INT32}"),
        ("shows", False, torch.bool, f"1 to {INT32}"),
        ("clicks", 2**32 + 1, torch.int64, f"to {INT32}"),
        ("clicks", 2**31, torch.uint32, f"to {INT32}"),
        ("timestamps", -(2**63), torch.int64, f"{-INT64} to {INT64}"),
        ("timestamps", 2**63 + 5, torch.uint64, f"{-INT64} to {INT64}"),
    ],
)
@pytest.mark.parametrize("ahead", [False, True], ids=["", "prefetched"])
def test_what_is_out_of_range(
    device: torch.device, name: str, value: int, dtype: torch.dtype, allowed: str, ahead: bool
) -> None:
    embedding = make(device)
    train(embedding)
    before = counted(embedding)
    given = {name: torch.tensor([1, value], dtype=dtype)}
    if ahead:
        embedding.prefetch(torch.tensor([7, 8]), torch.tensor([0, 1, 2]), **given)
        embedding.queue.wait()
    with pytest.raises(ValueError, match=f"^{name} has {value!r}.* allowed are .*{allowed}"):
        train(embedding, **given)
    assert counted(embedding) == before
    train(embedding)


def test_what_is_in_range(device: torch.device) -> None:
    embedding = make(device)
    train(embedding, shows=torch.tensor([INT32, 1]), clicks=torch.tensor([INT32, -(2**32) + 1]))
    train(embedding, shows=torch.tensor([True, True]), clicks=torch.tensor([-4, 2]))
    train(embedding, timestamps=torch.tensor([6, -7], dtype=torch.int16), clicks=torch.tensor([255, 0]).byte())
    assert counted(embedding) == {
        "ids": [7, 8],
        "count": [INT32 + 2, 3],
        "last_use": [3, 3],
        "clicks": [INT32 + 255, 2],
        "timestamp": [6, -7],
    }
