"""The questions of ranks to each other: the numbers of ids of a batch, then the ids."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torchrec.distributed.types import Awaitable
from torchrec.streamable import Multistreamable

from ..modules.bags import Bags
from ..tbe.config.life import NEVER, Seen
from .alike import TrainingSettings
from .collectives import Exchange
from .dedup import Deduplication, UniqueBatch
from .levels import Relayed

FAILED, TRAINING, ENDED = 1, 2, 4
"""The bits that a rank tells all others of its batch."""
HEADER = 4
"""Numbers that say which batch it is: of the collection, of the batch, this status, the settings."""


class RanksEndedError(Exception):
    """Raised for a batch that some rank does not have: its data ended before."""


class ShardedContext(Multistreamable):
    """One batch on its way through a sharded collection.

    Attributes:
        batch: its number among those of the collection.
        settings: a checksum of what training goes by on this rank.
        at_once: whether this rank exchanges nothing else between its ids and its rows.
    """

    def __init__(self) -> None:
        self.bags: Bags | None = None
        self.asked: UniqueBatch | None = None
        self.error: Exception | None = None
        self.training = self.ended = self.at_once = False
        self.batch = self.settings = 0

    def record_stream(self, stream: torch.Stream) -> None:
        """Its tensors are on the host."""


class Asked(Multistreamable):
    """Ids that all ranks ask this one for.

    Attributes:
        values: int64 `[n]`, rank by rank, and there table by table.
        seen: what the ranks told of each beside it; None where no table needs to know, or no rank trains.
        offsets: int64 `[W * T + 1]`.
        counts: int64 `[W, T]`.
        relayed: int64 `[L, W / L, T]`, ids that this rank passed on, by two levels; see `levels`.
    """

    def __init__(self, values: torch.Tensor, seen: Seen | None, counts: np.ndarray, relayed: Relayed) -> None:
        self.values, self.seen, self.counts, self.relayed = values, seen, counts, relayed
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
        relayed: Relayed,
        seen: Callable[[torch.Tensor, torch.Tensor], Seen],
    ) -> None:
        """`sent`: of `Exchange.send_each`: the ids, and perhaps what they take along, from which `seen` is made."""
        super().__init__()
        self._exchange, self._sent, self._counts, self._seen = exchange, sent, counts, seen
        self._relayed = relayed
        self._asked: Asked | None = None

    def _wait_impl(self) -> Asked:
        if self._asked is None:
            with self._exchange.waiting("ids"):
                for work, _ in self._sent:
                    work.wait()
            values, *numbers = (tensor for _, tensor in self._sent)
            seen = self._seen(values, *numbers) if numbers else None
            self._asked = Asked(values, seen, self._counts, self._relayed)
        return self._asked


class CountsAwaitable(Awaitable[Awaitable[Asked]]):
    """The numbers of ids are on their way; before them comes which batch of which collection they are of."""

    def __init__(
        self, exchange: Exchange, ctx: ShardedContext, deduplication: Deduplication, settings: TrainingSettings
    ) -> None:
        super().__init__()
        self._exchange, self._ctx, self._deduplication, self._settings = exchange, ctx, deduplication, settings
        tables = len(deduplication.tables.configs)
        self._sent, latest = np.zeros((exchange.world_size, tables), np.int64), np.full(tables, NEVER)
        if ctx.asked is not None:
            self._sent, latest = ctx.asked.questions.counts, ctx.asked.host.latest
        exchange.batches += 1
        ctx.batch = exchange.batches
        status = FAILED * (ctx.error is not None) + TRAINING * ctx.training + ENDED * ctx.ended
        header = [exchange.number, ctx.batch, status, ctx.settings]
        to_all = np.concatenate([header, latest[deduplication.dated]])
        self._ends = [HEADER, len(to_all), len(to_all) + tables]
        self._work, self._received, self._relayed = exchange.send_counts(to_all, self._sent)

    @property
    def awaitables(self) -> list[Awaitable[Awaitable[Asked]]]:
        """The attribute by which TorchRec's pipelines look into requests."""
        return [self]

    def _wait_impl(self) -> Awaitable[Asked]:
        with self._exchange.waiting("numbers of ids"):
            self._work.wait()
        headers, latest, counts, _ = np.split(self._received.numpy(), self._ends, axis=1)
        self._check(headers)
        assert self._ctx.asked is not None
        questions, words = self._ctx.asked.questions, self._deduplication.words
        to, of = self._sent.sum(axis=1).tolist(), counts.sum(axis=1).tolist()
        relayed = None
        if self._relayed is not None:
            relayed = np.ascontiguousarray(np.split(self._relayed.numpy(), self._ends, axis=2)[2])
        passed_on = None if relayed is None else relayed.sum(axis=2)
        sent = [self._exchange.send_each(questions.ids, to, of, passed_on)]
        if self._ctx.training and words.any():
            to, of = (self._sent @ words).tolist(), (counts @ words).tolist()
            passed_on = None if relayed is None else relayed @ words
            sent.append(self._exchange.send_each(questions.numbers, to, of, passed_on))
        counts = np.ascontiguousarray(counts)
        seen = functools.partial(self._deduplication.received, counts, latest)
        return AskedAwaitable(self._exchange, sent, counts, relayed, seen)

    def _check(self, headers: np.ndarray) -> None:
        """Compares the headers of all ranks; every rank finds the same.

        Raises:
            RanksEndedError: some rank has no such batch.
            RuntimeError: ranks are at other batches, or some train what others evaluate.
            ValueError: they train by other settings.
            Exception: some rank's batch failed.
        """
        status = headers[:, 2]
        if (headers[:, :2] != headers[0, :2]).any():
            self._exchange.batches -= 1  # on each rank of the collection that it has called: they count alike again
            raise self._exchange.out_of_step(self._doing(headers))
        if (status & ENDED).any():
            raise RanksEndedError
        if (status & FAILED).any():
            self._exchange.raise_together(self._ctx.error)
        if (status != status[0]).any():
            raise self._exchange.out_of_step(self._doing(headers))
        if (headers != headers[0]).any():
            self._exchange.raise_apart(self._doing(headers)[0], self._settings.told())

    def _doing(self, headers: np.ndarray) -> list[str]:
        """Says for each rank which batch of which collection it is at."""
        doing = self._exchange.turns.doing
        return [doing(number, batch, bool(status & TRAINING)) for number, batch, status, _ in headers.tolist()]
