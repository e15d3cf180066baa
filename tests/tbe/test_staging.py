"""Staging buffers are freed together with their plan, however the plan ends."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from embeddings import embedding_of, windowed

from rec_sdk_torch.tbe import Pooling, TableBatchedEmbedding, TableConfig
from rec_sdk_torch.tbe.step import step as training_step
from rec_sdk_torch.tbe.step.prefetch_queue import Prefetched

SIZE = 8


class StagingCounter:
    """A counter of the live staging bytes, independent of the embedding's own report."""

    def __init__(self, embedding: TableBatchedEmbedding) -> None:
        self._taken: list[weakref.ref[torch.Tensor]] = []
        self._embedding = weakref.ref(embedding)
        for group in embedding.groups:
            transfers = group.swap.transfers
            transfers.staging = self._watched(transfers.staging)
            transfers.upload = self._watched_upload(transfers.upload)  # type: ignore[method-assign]

    def _watched(self, take: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def taken(*arguments: Any) -> torch.Tensor:
            memory = take(*arguments)
            if arguments[0] > 1:  # a plan's arrays live as long as the plan
                self._taken.append(weakref.ref(memory))
            return memory

        return taken

    def _watched_upload(self, upload: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def uploaded(staging: torch.Tensor) -> Any:
            result = upload(staging)
            if result.memory is not staging and staging.dim() == 2:
                self._taken.append(weakref.ref(result.memory))
            return result

        return uploaded

    def bytes(self) -> int:
        return sum(memory.nbytes for ref in self._taken if (memory := ref()) is not None)

    def left(self) -> int:
        """Returns the bytes that remain once other threads have finished with their buffers."""
        until = time.monotonic() + 30
        while self.bytes() and time.monotonic() < until:
            time.sleep(0.001)
        return self.bytes()

    def check(self, some: bool) -> None:
        """Checks whether staging memory is allocated; `some` is the expected answer."""
        embedding = self._embedding()
        count = self.bytes() if some else self.left()
        assert (count > 0) is some, count
        if embedding is not None:
            assert (embedding.memory_report()["staging"] > 0) is some


def make(device: torch.device, window: int = 1) -> TableBatchedEmbedding:
    """Builds an embedding with two groups."""
    tables = [TableConfig(f"t{dim}", 1000, dim, pooling=Pooling.SUM) for dim in (4, 8)]
    return embedding_of(*tables, optimizer=windowed("SGD", window, lr=0.1), cache=6 * SIZE, device=device)


def batch(number: int, count: int = SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(2 * count) + 100 * number, torch.arange(2 * count + 1)


def train(embedding: TableBatchedEmbedding, *numbers: int) -> None:
    for number in numbers:
        embedding(*batch(number)).sum().backward()


def complete_write_backs(embedding: TableBatchedEmbedding) -> None:
    """Completes pending write-backs."""
    embedding.view("t4").count(), embedding.view("t8").count()


@torch.no_grad()
def read(embedding: TableBatchedEmbedding) -> None:
    for number in (1, 2):
        embedding(*batch(number))


def train_another(embedding: TableBatchedEmbedding) -> None:
    train(embedding, 3)
    embedding.forget()
    complete_write_backs(embedding)


def train_both(embedding: TableBatchedEmbedding) -> None:
    train(embedding, 1, 2)
    complete_write_backs(embedding)


def outputs_of(embedding: TableBatchedEmbedding) -> list[torch.Tensor]:
    outputs = [embedding(*batch(number)) for number in (1, 2)]
    complete_write_backs(embedding)
    return outputs


def fail_in(embedding: TableBatchedEmbedding, what: type[BaseException], of: Any, name: str) -> BaseException:
    """Runs a forward in which `of.name` raises, and forgets the next batch; returns the error, which the caller
    keeps.
    """
    with mock.patch.object(of, name, side_effect=what), pytest.raises(what) as raised:
        embedding(*batch(1))
    embedding.forget()
    return raised.value


def fail_in_planning(embedding: TableBatchedEmbedding) -> BaseException:
    embedding.forget()
    return fail_in(embedding, KeyboardInterrupt, embedding.groups[1], "plan")


def plan_a_too_large_batch(embedding: TableBatchedEmbedding) -> None:
    embedding.forget()
    with pytest.raises(RuntimeError, match="distinct rows in the device cache"):
        embedding(*batch(1, 10 * SIZE))


def drop_plans_oldest_first(embedding: TableBatchedEmbedding) -> None:
    """Drops plans, oldest first, as an interrupt may; a plan without references undoes itself."""
    for coming in tuple(embedding.queue._queued):
        coming.plans = None


ENDS_OF_PLANS: dict[str, Callable[[TableBatchedEmbedding], object]] = {
    "read": read,
    "evaluate": lambda embedding: read(embedding.eval()),
    "forget": lambda embedding: embedding.forget(),
    "forget one by one": lambda embedding: [embedding.forget(one) for one in tuple(embedding.queue._queued)],
    "another batch": train_another,
    "trained": train_both,
    "outputs dropped": lambda embedding: len(outputs_of(embedding)),
    "outputs kept": outputs_of,
    "a whole table": complete_write_backs,
    "state_dict": lambda embedding: embedding.state_dict(),
    "load": lambda embedding: embedding.load_state_dict(embedding.state_dict()),
    "exclusive": lambda embedding: embedding.exclusive().__enter__(),
    "fails to stage": lambda embedding: fail_in(embedding, OSError, embedding.groups[1], "stage"),
    "interrupted": lambda embedding: fail_in(embedding, KeyboardInterrupt, training_step._engine, "start_plans"),
    "planning interrupted": fail_in_planning,
    "too large": plan_a_too_large_batch,
    "let go": drop_plans_oldest_first,
}


@pytest.fixture
def planned(device: torch.device) -> tuple[TableBatchedEmbedding, StagingCounter, list[Prefetched]]:
    """Returns an embedding with two prefetched batches whose rows are all cache misses."""
    embedding = make(device)
    train(embedding, 0)
    complete_write_backs(embedding)
    staged = StagingCounter(embedding)
    coming = [embedding.prefetch(*batch(number)) for number in (1, 2)]
    embedding.queue.wait()
    staged.check(True)
    return embedding, staged, coming


@pytest.mark.parametrize("way", ENDS_OF_PLANS)
def test_staging_memory_is_freed_with_its_plan(
    planned: tuple[TableBatchedEmbedding, StagingCounter, list[Prefetched]], way: str
) -> None:
    embedding, staged, _ = planned
    kept = ENDS_OF_PLANS[way](embedding)
    staged.check(False)
    del kept
    embedding.train()
    train_both(embedding)
    staged.check(False)


def test_staging_memory_is_freed_with_the_embedding(device: torch.device) -> None:
    embedding = make(device)
    train(embedding, 0)
    staged = StagingCounter(embedding)
    embedding.prefetch(*batch(1))
    embedding.queue.wait()
    assert staged.bytes()
    del embedding
    assert staged.left() == 0


def test_staging_memory_is_freed_at_the_end_of_a_window(device: torch.device) -> None:
    embedding = make(device, window=2)
    train(embedding, 0)
    staged = StagingCounter(embedding)
    for number in range(1, 6):
        embedding.prefetch(*batch(number + 1))
        embedding.queue.wait()
        train(embedding, number)
    embedding.forget()
    complete_write_backs(embedding)
    staged.check(False)


def test_reads_between_steps_that_were_planned_ahead(device: torch.device) -> None:
    """A loop prefetches, and evaluates between steps without calling eval()."""
    embedding = make(device)
    train(embedding, 0)
    complete_write_backs(embedding)
    staged, most = StagingCounter(embedding), 0
    for number in range(1, 20):
        embedding.prefetch(*batch(number))
        embedding.queue.wait()
        most = max(most, staged.bytes())
        with torch.no_grad():
            embedding(*batch(number))
        staged.check(False)
    assert most < 20000
