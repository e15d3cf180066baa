"""Loops that prefetch batches but never look some of them up.

They cause one warning, planning stops, and no plan or pinned row remains.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from batches import jagged
from collection_factory import POOLED, SEQUENCE, Kind, apply
from torchrec import KeyedJaggedTensor
from torchrec.distributed.train_pipeline import TrainPipelineBase
from training import read, train_step

import rec_sdk_torch as rst
from rec_sdk_torch.fbgemm import ComputeDevice, EmbeddingLocation, SplitTableBatchedEmbeddingBagsCodegen
from rec_sdk_torch.tbe.step.prefetch_queue import MAX_UNUSED

SIZE = 16
ROW = 16 + 16
"""Bytes of a record: four weights, and Adagrad's sums."""
UNUSED = "were not the prefetched ones"


def make(device: torch.device, policy: str = "lrfu", kind: Kind = POOLED) -> Any:
    """Builds tables and trains them on one batch."""
    tables = kind.collection(device, kind.config(num_embeddings=9000), cache=600, cache_policy=policy)
    train_step(apply(tables, torch.optim.Adagrad, lr=0.1), batch_of(0))
    return tables


def batch_of(step: int) -> KeyedJaggedTensor:
    return jagged({"f0": [[SIZE * step + i] for i in range(SIZE)]})


def batches(count: int = 30) -> Iterator[KeyedJaggedTensor]:
    """Yields batches with rows that are not in the cache."""
    return map(batch_of, range(count))


def remapped(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Returns a copy with other ids, like a model that remaps ids before the lookup."""
    return KeyedJaggedTensor(batch.keys(), batch.values() * 3 + 5000, lengths=batch.lengths())


class Plans:
    """A counter of plans: how many were created, and the largest number that existed at once."""

    def __init__(self, tables: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = self.most = 0
        self._tables = tables
        (group,) = tables.embedding.groups
        plan = group.plan

        def counted(*arguments: Any) -> Any:
            self.made += 1
            return plan(*arguments)

        monkeypatch.setattr(group, "plan", counted)

    def count(self) -> None:
        self._tables.wait_for_plans()
        coming = tuple(self._tables.embedding.queue._queued)
        self.most = max(self.most, sum(each.plans is not None for each in coming))


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_model_that_changes_ids_gets_one_warning(
    device: torch.device, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, plain = make(device), make(device)
    plans = Plans(tables, monkeypatch)
    source = rst.prefetch(batches(), tables, depth)
    so_far = [0]

    def run() -> None:
        for batch in source:
            plans.count()
            train_step(tables, remapped(batch))
            so_far.append(plans.made)

    with pytest.warns(UserWarning, match=rf"tables \['t0'\].*{UNUSED}.*features=") as caught:
        run()
    assert len([each for each in caught if UNUSED in str(each.message)]) == 1
    assert plans.most <= depth + 1
    made = [after - before for before, after in pairwise(so_far)]
    assert sum(made[: MAX_UNUSED - 1]) >= 2 * (MAX_UNUSED - 1)
    assert made[MAX_UNUSED + 1 :] == [1] * (len(made) - MAX_UNUSED - 1), "its own, and no other"
    for batch in batches():
        train_step(plain, remapped(batch))
    assert torch.equal(tables.table_ids("t0"), plain.table_ids("t0"))
    # Once a batch is looked up, the next ones are planned again.
    for batch in rst.prefetch(batches(), tables, depth):
        plans.count()
        train_step(tables, batch)
    assert plans.made == so_far[-1] + 30
    assert plans.most == depth + 1


def evaluate(tables: Any, batch: KeyedJaggedTensor) -> None:
    tables.eval()
    tables(batch)
    tables.train()


def some(tables: Any, batch: KeyedJaggedTensor) -> None:
    if int(batch.values()[0]) % 3:
        train_step(tables, batch)


Loop = Callable[[Any, KeyedJaggedTensor], Any]
LOOPS: dict[str, Loop] = {
    "train": train_step,
    "some": some,
    "read": read,
    "evaluate": evaluate,
    "read, then train": lambda tables, batch: (read(tables, batch), train_step(tables, batch)),
}
TOLD_NOTHING: dict[str, Loop] = {
    **LOOPS,
    "another data set between": lambda tables, batch: (train_step(tables, batch), train_step(tables, remapped(batch))),
}
NO_ROW_LEFT: dict[str, Loop] = {
    **LOOPS,
    "leave": lambda tables, batch: tables(batch),
    "train another": lambda tables, batch: train_step(tables, remapped(batch)),
    "look": lambda tables, batch: (train_step(tables, batch), tables.state_dict()),
}


@pytest.mark.parametrize("loop", TOLD_NOTHING)
@pytest.mark.parametrize("policy", ["lrfu", "look_ahead"])
def test_loops_without_a_warning(device: torch.device, loop: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = make(device, policy)
    plans = Plans(tables, monkeypatch)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{UNUSED}")
        for batch in rst.prefetch(batches(40), tables, 2):
            plans.count()
            TOLD_NOTHING[loop](tables, batch)
    assert plans.most <= 3


def test_batches_that_are_only_read_are_not_planned(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch may have been planned before the loop first reads a batch without training it."""
    tables = make(device)
    plans = Plans(tables, monkeypatch)
    for batch in rst.prefetch(batches(), tables, 2):
        plans.count()
        read(tables, batch)
    assert plans.made <= 3
    train_step(tables, batch_of(50))
    made = plans.made
    for batch in rst.prefetch(batches(10), tables, 2):
        plans.count()
        train_step(tables, batch)
    assert plans.made == made + 10, "ahead, each once"


@pytest.mark.parametrize("depth", [1, 3])
def test_pipelines_that_hold_batches_plan_no_further(
    device: torch.device, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While TorchRec's pipelines hold batches for later steps, no further batches are planned."""
    tables = make(device)
    plans = Plans(tables, monkeypatch)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = tables
            self.scale = torch.nn.Parameter(torch.ones(1, device=device))

        def forward(self, batch: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
            plans.count()
            output = self.tables(batch).values() * self.scale
            return output.sum(), output

    model = Model()
    pipeline = TrainPipelineBase(model, torch.optim.SGD([model.scale], lr=0.1), device)
    coming = rst.prefetch(batches(), tables, depth)
    for _ in range(28):
        pipeline.progress(coming)
    assert 1 < plans.most <= depth + 1
    assert tables.cache_stats()["depth_reached"] <= depth + 1


@pytest.mark.filterwarnings(f"ignore:.*{UNUSED}")
@pytest.mark.parametrize("loop", NO_ROW_LEFT)
@pytest.mark.parametrize(("kind", "policy"), [(POOLED, "lrfu"), (SEQUENCE, "look_ahead")], ids=str)
def test_a_loop_keeps_no_staged_rows(device: torch.device, loop: str, kind: Kind, policy: str) -> None:
    tables, most = make(device, policy, kind), 0
    for batch in rst.prefetch(batches(), tables, 2):
        tables.wait_for_plans()
        most = max(most, tables.memory_report()["staging"])
        NO_ROW_LEFT[loop](tables, batch)
    assert most <= 2 * 8 * SIZE * ROW + 8 * 4096, "rows that come and that leave, and arrays, of a few batches"
    tables.state_dict()  # completes pending write-backs
    assert tables.memory_report()["staging"] == 0


@pytest.mark.parametrize("ended", ["read", "closed"])
def test_leaving_a_loop_releases_its_plans(device: torch.device, ended: str) -> None:
    tables = make(device)
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
    arguments = [(torch.arange(SIZE) + SIZE * step, torch.arange(SIZE + 1)) for step in range(30)]
    module(*arguments[0]).sum().backward()
    for batch in arguments[1:]:
        module.prefetch(*batch)
        module.tables.queue.wait()
        with torch.no_grad():
            module(*batch)
    assert module.tables.memory_report()["staging"] == 0
