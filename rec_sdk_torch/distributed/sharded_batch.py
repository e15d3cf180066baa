"""One batch of a sharded collection on its way between the ranks: ids to their owners, rows back, gradients again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Multistreamable

from ..modules.bags import Bags
from ..tbe import IdSignals, Int64Array, Prefetched
from .all_to_all import Relayed, Work
from .collectives import Exchange, StatusCheck
from .dedup import Deduplication, UniqueBatch
from .local_shard import LocalShard
from .replicas import Route

FAILED, TRAINING, ENDED = 1, 2, 4
"""The bits that a rank tells all others of its batch."""
HEADER = 4
"""Numbers that say which batch it is: of the collection, of the batch, this status, the settings."""


class RanksEndedError(Exception):
    """Raised for a batch that some rank does not have: its data ended before."""


class ShardedBatch(Multistreamable):
    """A batch's exchanges with the other ranks. TorchRec's pipelines carry it as their context, and as the batch's ids.

    All ranks call the stages in one order: `send_counts`, `send_ids`, `receive_ids`, `send_rows`, `receive_rows`; the
    backward pass of `SendRows` is the last. An error of one rank is raised by all.

    Attributes:
        exchange: with the other ranks.
        batch: its number among the batches of the collection.
        bags: the batch as this rank was given it.
        unique: its distinct ids.
        settings: a checksum of what this rank trains by.
        missing: whether this rank has no such batch, since its data has ended.
        training: whether the batch was begun in training mode.
        trains: whether its rows are looked up in training mode.
        immediate: whether this rank exchanges nothing else between its ids and its rows.
        error: what failed on this rank.
        values: ids that all ranks ask this one for, int64 `[n]`, rank by rank, and there table by table.
        counts, offsets: of `values`, int64 `[W, T]` and `[W * T + 1]`.
        signals: what the ranks told of each of `values`; None where no table needs it, or no rank trains.
    """

    values: torch.Tensor
    counts: Int64Array
    offsets: torch.Tensor

    def __init__(self, shard: LocalShard, deduplication: Deduplication, depth: int | None = None) -> None:
        """
        Args:
            shard: the rows of this rank.
            deduplication: of the collection's batches.
            depth: as of `CachedCollection.prefetch`, for a batch that is prefetched.
        """
        self.exchange, self._shard, self._deduplication, self._depth = shard.exchange, shard, deduplication, depth
        self.batch = self.settings = 0
        self.bags: Bags | None = None
        self.unique: UniqueBatch | None = None
        self.missing = self.training = self.trains = self.immediate = False
        self.error: Exception | None = None
        self.signals: IdSignals | None = None
        self._works: list[Work] = []
        self._sent = self._received = False
        self._relayed: Relayed = None
        self._numbers: torch.Tensor | None = None
        self._aliases: list[KeyedJaggedTensor] = []
        self._prefetched: Prefetched | None = None
        self._raised: Exception | None = None
        self._check: StatusCheck | None = None

    def record_stream(self, stream: torch.Stream) -> None:
        """Does nothing: the tensors of a turn are on the host."""

    # ---- ids to their owners

    def send_counts(self) -> None:
        """Starts to send each rank the numbers of its ids, behind what all ranks compare."""
        exchange, timestamped = self.exchange, self._deduplication.timestamped
        exchange.batches += 1
        self.batch = exchange.batches
        status = FAILED * (self.error is not None) + TRAINING * self.training + ENDED * self.missing
        table = np.zeros((exchange.world_size, exchange.group_state.width), np.int64)
        table[:, :HEADER] = exchange.number, self.batch, status, self.settings
        first = HEADER + len(timestamped)
        self._counted = slice(first, first + len(self._deduplication.words))
        if self.unique is not None:
            table[:, HEADER:first] = self.unique.host.latest[timestamped]
            table[:, self._counted] = self.unique.sent_ids.counts
        self._work, self._table, self._passed_on = exchange.ids_all_to_all.exchange_counts(torch.from_numpy(table))

    def send_ids(self) -> None:
        """Waits for the numbers of all ranks, and starts to send the ids.

        Raises:
            RanksEndedError: some rank has no such batch.
            RuntimeError: ranks are at other batches, or some train what others evaluate.
            ValueError: they train by other settings.
            Exception: some rank's batch failed.
        """
        self.exchange.wait("numbers of ids", self._work)
        table = self._table.numpy()
        headers = table[:, :HEADER]
        if headers[0, 2] & ~TRAINING or (headers != headers[0]).any():
            self._raise(headers)
        self.counts = np.ascontiguousarray(table[:, self._counted])
        if self._passed_on is not None:
            self._relayed = np.ascontiguousarray(self._passed_on.numpy()[:, :, self._counted])
        assert self.unique is not None
        sent_ids, words = self.unique.sent_ids, self._deduplication.words
        self.values = self._send(sent_ids.ids, np.ones_like(words))
        if self.training and words.any():
            self._numbers = self._send(sent_ids.numbers, words)
        self._sent = True

    def _send(self, values: npt.NDArray[Any], words: Int64Array) -> torch.Tensor:
        """Starts to send each rank its part of `values`, which have so many elements for an id of each table."""
        assert self.unique is not None
        to, of = (self.unique.sent_ids.counts @ words).tolist(), (self.counts @ words).tolist()
        relayed = None if self._relayed is None else self._relayed @ words
        work, received = self.exchange.ids_all_to_all.to_owners(torch.from_numpy(values), to, of, relayed)
        self._works.append(work)
        return received

    def _raise(self, headers: Int64Array) -> NoReturn:
        """Raises what the headers of all ranks say, which every rank finds the same; see `send_ids`."""
        exchange, status = self.exchange, headers[:, 2]
        activities = [
            exchange.describe_activity(number, batch, bool(bits & TRAINING))
            for number, batch, bits, _ in headers.tolist()
        ]
        if (headers[:, :2] != headers[0, :2]).any():
            exchange.batches -= 1  # on each rank of the collection that it has called: they count alike again
            raise exchange.out_of_step_error(activities)
        if (status & ENDED).any():
            raise RanksEndedError
        if (status & FAILED).any():
            exchange.raise_on_all_ranks(self.error)
        if (status != status[0]).any():
            raise exchange.out_of_step_error(activities)
        exchange.raise_difference(activities[0], self._shard.settings.as_text())

    def receive_ids(self) -> None:
        """Waits for the ids that all ranks ask this one for; raises what `send_ids` raises or has raised."""
        if self._raised is not None:
            raise self._raised
        if not self._sent:
            self.send_ids()
        if self._received:
            return
        self.exchange.wait("ids", *self._works)
        if self._numbers is not None:
            latest = self._table.numpy()[:, HEADER : self._counted.start]
            self.signals = self._deduplication.received_signals(self.counts, latest, self.values, self._numbers)
        self.offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(self.counts)]))
        self._received = True

    # ---- a batch that was prefetched

    def add_source(self, features: KeyedJaggedTensor, values: torch.Tensor | None = None) -> None:
        """Lets the batch come as `features`."""
        self._aliases.append(features)

    def matches(self, features: KeyedJaggedTensor) -> bool:
        """Returns whether it is this batch. Ids are not compared: all ranks must come to the same answer."""
        return any(features is known for known in self._aliases)

    def advance(self) -> None:
        """Goes on to the next stage: ids are sent, then those that arrived are planned. Its forward raises errors."""
        if self._raised is not None or self._prefetched is not None:
            return
        try:
            if not self._sent:
                self.send_ids()
            else:
                self.receive_ids()
                self._prefetched = self._shard.prefetch_received(self.values, self.offsets, self.signals, self._depth)
        except Exception as error:
            self._raised = error

    def is_past_end(self) -> bool:
        """Returns whether some rank has no such batch: then there is none. Waits for the ranks, which all call it."""
        if not self._sent:
            self.advance()
        if isinstance(self._raised, RanksEndedError):
            return True
        if self.missing and self._raised is not None:  # of a batch, its forward raises it
            raise self._raised
        return False

    def discard(self) -> None:
        """Forgets the batch: its forward will not come, or is over."""
        if self._prefetched is not None:
            self._shard.forget(self._prefetched)

    # ---- rows of the ids, and their gradients

    def start_check(self) -> None:
        """Starts to compare which batch each rank looks up, and whether it has failed on any."""
        exchange = self.exchange
        activity = exchange.describe_activity(exchange.number, self.batch, self.trains)
        self._check = exchange.start_check(self.error is not None, activity, exchange.group_state.gradients)

    def finish_check(self) -> None:
        """Waits for the status check; raises the error of the first rank on which the batch failed, on all ranks."""
        check, self._check = self._check, None
        if check is not None and self.exchange.finish_check(check):
            self.exchange.raise_on_all_ranks(self.error)

    def send_rows(self, rows: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[Work]]:
        """Starts to send each rank the rows that it asked for.

        Args:
            rows: of the tables of each dim, float32 `[n, D]`, in the order of `values`.

        Returns:
            (rows of the distinct ids of this rank, of each dim, and the work that brings them)
        """
        self.start_check()
        # Between its ids and its rows this rank may have exchanged others, in another order than other ranks. Then rows
        # of two batches would meet, which gives garbage or ends the process.
        if not self.immediate:
            self.finish_check()
        assert self.unique is not None
        sent, asked, relayed = self.unique.host.counts, self.counts, self._relayed
        replicas, received = self._deduplication.replicas, []
        works: list[Work] = []
        for group, part in zip(self._deduplication.groups, rows, strict=True):
            of, to = sent[:, group].sum(axis=1).tolist(), asked[:, group].sum(axis=1).tolist()
            passed_on = None if relayed is None else relayed[:, :, group].sum(axis=2)
            route = Route(to, of, of, to, relayed=passed_on, grads_relayed=passed_on)
            if self.training and replicas.any:
                route = replicas.route(route, sent, asked, relayed, group, self.exchange.device)
            received.append(SendRows.apply(part, self.exchange, self.batch, route, works))
        for groups in self.exchange.hierarchical:
            groups.start_all()
        self._count(self.unique)
        return received, works

    def receive_rows(self, works: list[Work]) -> None:
        """Waits for the rows that `send_rows` returned; raises what failed on any rank, each time that it is called."""
        if self._raised is None:
            try:
                self.finish_check()
            except Exception as error:
                self._raised = error
        if self._raised is not None:
            raise self._raised
        self.exchange.wait("rows", *works)

    def _count(self, batch: UniqueBatch) -> None:
        """Adds the batch to the counters of `ShardedCollection.exchange_stats`."""
        stats, rank, tables = self.exchange.stats, self.exchange.rank, self._deduplication
        unique, lookups, told = batch.host.counts, batch.host.lookups, batch.sent_ids.counts
        words = tables.words if self.training else 0
        stats["lookups"] += int(lookups.sum())
        stats["unique_ids"] += int(unique.sum())
        stats["id_bytes"] += int(((told.sum(axis=0) - told[rank]) * (8 + 4 * words)).sum())
        stats["row_bytes"] += int(((unique.sum(axis=0) - unique[rank]) * tables.row_bytes).sum())
        every = lookups.sum(axis=0) - lookups[rank]
        stats["bytes_with_duplicates"] += int((every * (8 + tables.row_bytes * (1 + self.trains))).sum())


class SendRows(torch.autograd.Function):
    """Rows float32 `[n, D]` to the ranks that asked for them, and in the backward pass their gradients back.

    The result may be read once the work that it adds to `works` is waited for.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, exchange: Exchange, batch: int, route: Route, works: list[Work]
    ) -> torch.Tensor:
        sent = rows.contiguous() if route.sent_rows is None else rows.index_select(0, route.sent_rows)
        exchange_rows = exchange.rows_all_to_all.from_owners
        try:
            work, received = exchange_rows(sent, route.rows_to, route.rows_from, route.relayed)
        except RuntimeError as error:
            raise exchange.lost("rows", error) from error
        works.append(work)
        ctx.exchange, ctx.batch, ctx.route = exchange, batch, route
        return received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        exchange, route = ctx.exchange, ctx.route
        if get_gradient_division() and exchange.world_size > 1:  # TorchRec's convention: losses are averaged over ranks
            grad = grad / exchange.world_size
        exchange.stats["grad_bytes"] += (sum(route.grads_to) - route.grads_to[exchange.rank]) * grad.shape[1] * 4
        exchange.record_gradients(ctx.batch, grad.shape[1])
        sent = grad.contiguous() if route.grad_rows is None else grad.index_select(0, route.grad_rows)
        exchange_gradients = exchange.rows_all_to_all.to_owners
        try:
            work, result = exchange_gradients(sent, route.grads_to, route.grads_from, route.grads_relayed)
            work.wait()
        except RuntimeError as error:
            raise exchange.lost("gradients", error) from error
        return result, None, None, None, None


class StageAwaitable(Awaitable[Any]):
    """A stage of a turn that TorchRec's pipelines wait for, and what they get then."""

    def __init__(self, stage: Callable[[], None], then: Any) -> None:
        super().__init__()
        self._stage, self._then = stage, then

    @property
    def awaitables(self) -> list[StageAwaitable]:
        """The attribute by which TorchRec's pipelines look into requests."""
        return [self]

    def _wait_impl(self) -> Any:
        self._stage()
        return self._then
