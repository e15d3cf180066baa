"""What ranks send each other: how many ids, the ids, their rows, and in the backward pass the rows' gradients."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torchrec.distributed.comm_ops import get_gradient_division

from ..tbe.batch import Int64Array

COUNTERS = ("lookups", "unique_ids", "id_bytes", "row_bytes", "grad_bytes", "bytes_with_duplicates")
"""What is counted, see `ShardedCollection.exchange_stats`."""


class Exchange:
    """The ranks that share the tables of a collection.

    Attributes:
        rank, world_size: of the groups.
        device: of rows.
        stats: counters.
    """

    def __init__(self, ids: dist.ProcessGroup, rows: dist.ProcessGroup, device: torch.device) -> None:
        """
        Args:
            ids: exchanges tensors in host memory.
            rows: exchanges tensors on `device`; of the same ranks.
        """
        self._ids, self._rows, self.device = ids, rows, device
        self.rank, self.world_size = dist.get_rank(ids), dist.get_world_size(ids)
        self.stats = dict.fromkeys(COUNTERS, 0)
        self._process = os.getpid()

    @property
    def ids(self) -> dist.ProcessGroup:
        """Exchanges tensors in host memory."""
        self._check_process()
        return self._ids

    @property
    def rows(self) -> dist.ProcessGroup:
        """Exchanges tensors on `device`."""
        self._check_process()
        return self._rows

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"process {os.getpid()} was forked from a rank, process {self._process}, whose exchanges with other "
                "ranks it would spoil: it cannot use sharded tables. Start processes by spawn"
            )

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Around what waits for other ranks.

        Raises:
            RuntimeError: the process group has, because a rank has died or does not come; or this process is no rank.
        """
        self._check_process()
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} of {self.world_size} could not exchange {what}: another rank has ended, has "
                f"raised an error, or has not come within the process group's timeout: {error}"
            ) from error

    def broadcast(self, number: int) -> int:
        """Rank 0's `number`, of 64 bits without sign."""
        tensor = torch.from_numpy(np.array([number], np.uint64).view(np.int64))
        dist.broadcast(tensor, dist.get_global_rank(self.ids, 0), group=self.ids)
        return int(tensor.numpy().view(np.uint64)[0])

    def send_counts(self, counts: Int64Array, to_all: Int64Array) -> tuple[Any, torch.Tensor]:
        """Tells each rank how many ids of each table it will get, int64 `[W, T]`, and all of them `to_all`, `[E]`.

        Returns:
            (work, int64 `[W, T + E]` of each rank)
        """
        table = np.concatenate([counts, np.tile(to_all, (self.world_size, 1))], axis=1)
        sent = torch.from_numpy(np.ascontiguousarray(table))
        received = torch.empty_like(sent)
        return dist.all_to_all_single(received, sent, group=self.ids, async_op=True), received

    def send_each(self, values: npt.NDArray[Any], to: list[int], of: list[int]) -> tuple[Any, torch.Tensor]:
        """Sends each rank its ids, or what they take along; (work, those of all ranks)."""
        sent = torch.from_numpy(values)
        received = sent.new_empty(sum(of))
        return dist.all_to_all_single(received, sent, of, to, group=self.ids, async_op=True), received

    def send_status(self, failed: bool) -> tuple[Any, torch.Tensor]:
        """(work, whether any rank failed)."""
        status = torch.tensor([int(failed)], device="cpu")
        return dist.all_reduce(status, dist.ReduceOp.MAX, group=self.ids, async_op=True), status

    def any_failed(self, failed: bool) -> bool:
        """Whether this or any other rank failed. All must call it."""
        return self.on_any(failed, "whether gradients are finite")

    def on_any(self, this: bool, what: str) -> bool:
        """Whether it is so on this or any other rank, where `what` names it. All must call it."""
        with self.waiting(what):
            work, status = self.send_status(this)
            work.wait()
        return bool(status.item())

    def raise_together(self, error: Exception | None) -> None:
        """Raises the same error on all ranks: that of the first one that has one. All must call it."""
        every: list[Any] = [None] * self.world_size
        with self.waiting("errors"):
            dist.all_gather_object(every, None if error is None else _packed(error), group=self.ids)
        rank, packed = next((rank, packed) for rank, packed in enumerate(every) if packed is not None)
        raised: Exception = pickle.loads(packed)
        raised.add_note(f"raised on rank {rank} of {self.world_size}, and so on all of them")
        raise raised from error


def _packed(error: Exception) -> bytes:
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
        return packed
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))


class SendRows(torch.autograd.Function):
    """Rows float32 `[n, D]` to the ranks that asked for them, and in the backward pass their gradients back.

    What it gives may be read once the work that it adds to `works` is waited for.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, exchange: Exchange, to: list[int], of: list[int], works: list[Any]
    ) -> torch.Tensor:
        received = rows.new_empty((sum(of), rows.shape[1]))
        with exchange.waiting("rows"):
            works.append(
                dist.all_to_all_single(received, rows.contiguous(), of, to, group=exchange.rows, async_op=True)
            )
        ctx.exchange, ctx.to, ctx.of = exchange, to, of
        return received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        exchange = ctx.exchange
        if get_gradient_division() and exchange.world_size > 1:  # TorchRec's convention: losses are averaged over ranks
            grad = grad / exchange.world_size
        exchange.stats["grad_bytes"] += (sum(ctx.of) - ctx.of[exchange.rank]) * grad.shape[1] * 4
        result = grad.new_empty((sum(ctx.to), grad.shape[1]))
        with exchange.waiting("gradients"):
            dist.all_to_all_single(result, grad.contiguous(), ctx.to, ctx.of, group=exchange.rows)
        return result, None, None, None, None
