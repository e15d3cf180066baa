"""What ranks ask each other for: the numbers of ids of a batch, then the ids."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torchrec.distributed.types import Awaitable
from torchrec.streamable import Multistreamable

from ..modules.bags import Bags
from ..tbe.life import NEVER, Seen
from .exchange import Exchange
from .unique import Deduplication, UniqueBatch

FAILED, TRAINING, ENDED = 1, 2, 4
"""What a rank tells all others of its batch."""


class RanksEndedError(Exception):
    """There is no such batch: some rank's data ended before."""


class ShardedContext(Multistreamable):
    """One batch on its way through a sharded collection."""

    def __init__(self) -> None:
        self.bags: Bags | None = None
        self.asked: UniqueBatch | None = None
        self.error: Exception | None = None
        self.training = self.ended = False

    def record_stream(self, stream: torch.Stream) -> None:
        """Its tensors are on the host."""


class Asked(Multistreamable):
    """Ids that all ranks ask this one for.

    Attributes:
        values: int64 `[n]`, rank by rank, and there table by table.
        seen: what the ranks told of each beside it; None where no table needs to know, or nobody trains.
        offsets: int64 `[W * T + 1]`.
        counts: int64 `[W, T]`.
    """

    def __init__(self, values: torch.Tensor, seen: Seen | None, counts: np.ndarray) -> None:
        self.values, self.seen, self.counts = values, seen, counts
        self.offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(counts.ravel())]))

    def record_stream(self, stream: torch.Stream) -> None:
        """Its tensors are on the host."""


class AskedAwaitable(Awaitable[Asked]):
    """The ids are on their way."""

    def __init__(
        self,
        exchange: Exchange,
        sent: Sequence[tuple[Any, torch.Tensor]],
        counts: np.ndarray,
        seen: Callable[[torch.Tensor, torch.Tensor], Seen],
    ) -> None:
        """`sent`: of `Exchange.send_each`: the ids, and perhaps what they take along, from which `seen` is made."""
        super().__init__()
        self._exchange, self._sent, self._counts, self._seen = exchange, sent, counts, seen
        self._asked: Asked | None = None

    def _wait_impl(self) -> Asked:
        if self._asked is None:
            with self._exchange.waiting("ids"):
                for work, _ in self._sent:
                    work.wait()
            values, *numbers = (tensor for _, tensor in self._sent)
            self._asked = Asked(values, self._seen(values, *numbers) if numbers else None, self._counts)
        return self._asked


class CountsAwaitable(Awaitable[Awaitable[Asked]]):
    """The numbers of ids are on their way."""

    def __init__(self, exchange: Exchange, ctx: ShardedContext, deduplication: Deduplication) -> None:
        super().__init__()
        self._exchange, self._ctx, self._deduplication = exchange, ctx, deduplication
        self._tables = tables = len(deduplication.tables.configs)
        self._sent, latest = np.zeros((exchange.world_size, tables), np.int64), np.full(tables, NEVER)
        if ctx.asked is not None:
            self._sent, latest = ctx.asked.host.counts, ctx.asked.host.latest
        status = FAILED * (ctx.error is not None) + TRAINING * ctx.training + ENDED * ctx.ended
        to_all = np.concatenate([[status], latest[deduplication.dated]])
        self._work, self._received = exchange.send_counts(self._sent, to_all)

    @property
    def awaitables(self) -> list[Awaitable[Awaitable[Asked]]]:
        """As TorchRec's pipelines look into requests."""
        return [self]

    def _wait_impl(self) -> Awaitable[Asked]:
        with self._exchange.waiting("numbers of ids"):
            self._work.wait()
        counts, status, latest = np.split(self._received.numpy(), [self._tables, self._tables + 1], axis=1)
        if (status & ENDED).any():
            raise RanksEndedError
        if (status & FAILED).any():
            self._exchange.raise_together(self._ctx.error)
        assert self._ctx.asked is not None
        host, words = self._ctx.asked.host, self._deduplication.words
        to, of = self._sent.sum(axis=1).tolist(), counts.sum(axis=1).tolist()
        sent = [self._exchange.send_each(host.ids, to, of)]
        if words.any():
            training = (status & TRAINING).astype(bool).ravel()
            if training.any() and not training.all():
                raise RuntimeError(
                    f"of {len(training)} ranks only {np.flatnonzero(training).tolist()} train this batch, the others "
                    "evaluate: ids of tables that admit or evict are counted on all ranks or on none"
                )
            if training.all():
                to, of = (self._sent @ words).tolist(), (counts @ words).tolist()
                sent.append(self._exchange.send_each(host.numbers, to, of))
        seen = functools.partial(self._deduplication.received, np.ascontiguousarray(counts), latest)
        return AskedAwaitable(self._exchange, sent, counts, seen)
