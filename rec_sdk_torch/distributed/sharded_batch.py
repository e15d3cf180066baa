"""The exchanges of one batch of a sharded collection: ids to their owner ranks, rows back, gradients to the owners."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
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
"""Status bits that a rank sends with its batch: the batch failed, the rank trains, the rank has no more data."""
HEADER = 4
"""Count of the first integers of a count message: collection, batch, status bits, and checksum of the settings."""


class RanksEndedError(Exception):
    """Error for a batch that some rank does not have, because the data of that rank ended earlier."""


class ShardedBatch(Multistreamable):
    """One batch of a sharded collection, exchanged with the other ranks in stages.

    TorchRec's pipelines pass it between stages as the batch's context. All ranks call the stages in the same order:
    `send_counts`, `send_ids`, `receive_ids`, `send_rows`, `receive_rows`; the last stage is the backward pass of
    `SendRows`. An error of one rank is raised on all ranks.

    Attributes:
        exchange: the exchanges with the other ranks.
        batch: the batch's number within the collection.
        bags: this rank's input batch.
        unique: the distinct ids of this rank's batch.
        settings: checksum of this rank's training settings.
        missing: whether this rank has no such batch because its data has ended.
        training: whether the exchange began in training mode.
        trains: whether the rows are looked up in training mode.
        immediate: whether this rank exchanged no other batch between the ids and the rows of this one.
        error: the error that a stage raised on this rank; None if none failed.
        values: the ids of this rank that any rank requested, int64 `[n]`, ordered by requesting rank, then by table.
        counts, offsets: counts and offsets of `values`, int64 `[W, T]` and `[W * T + 1]`.
        signals: id signals of `values`; None if no table uses them or no rank trains.
    """

    values: torch.Tensor
    counts: Int64Array
    offsets: torch.Tensor

    def __init__(self, shard: LocalShard, deduplication: Deduplication, depth: int | None = None) -> None:
        """Creates a batch whose stages have not begun.

        Args:
            shard: the rows that this rank owns.
            deduplication: finds the distinct ids of the collection's batches.
            depth: number of batches planned ahead, for a prefetched batch; see `CachedCollection.prefetch`.
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
        self._signal_words: torch.Tensor | None = None
        self._sources: list[KeyedJaggedTensor] = []
        self._prefetched: Prefetched | None = None
        self._raised: Exception | None = None
        self._sent_along: Callable[[], torch.Tensor] | None = None
        self._check: StatusCheck | None = None

    def record_stream(self, stream: torch.Stream) -> None:
        """Does nothing: the tensors of the batch are in host memory, where streams do not matter."""

    # ---- ids to their owners

    def send_counts(self) -> None:
        """Starts to send the header and the id counts of this rank to every rank, in shared memory also the ids."""
        exchange, timestamped = self.exchange, self._deduplication.timestamped
        exchange.batches += 1
        self.batch = exchange.batches
        status = FAILED * (self.error is not None) + TRAINING * self.training + ENDED * self.missing
        table = np.zeros((exchange.world_size, exchange.group_state.width), np.int64)
        table[:, :HEADER] = exchange.number, self.batch, status, self.settings
        first = HEADER + len(timestamped)
        ids, counts = np.empty(0, np.int64), table[:, :0]
        self._count_columns = slice(first, first + len(self._deduplication.words_per_id))
        if self.unique is not None:
            table[:, HEADER:first] = self.unique.host.latest[timestamped]
            ids, counts = self.unique.sent_ids.ids, self.unique.sent_ids.counts
            table[:, self._count_columns] = counts
        sent = torch.from_numpy(table), torch.from_numpy(ids), counts.sum(axis=1).tolist()
        self._work, self._table, self._forwarded, self._sent_along = exchange.ids_all_to_all.exchange_counts(*sent)

    def send_ids(self) -> None:
        """Waits for the headers and id counts of all ranks, compares the headers, and starts to send the ids.

        Raises:
            RanksEndedError: some rank has no such batch.
            RuntimeError: ranks are at different batches, or some train while others evaluate.
            ValueError: ranks train with different settings.
            Exception: the batch failed on some rank.
        """
        self.exchange.wait("numbers of ids", self._work)
        table = self._table.numpy()
        headers = table[:, :HEADER]
        if headers[0, 2] & ~TRAINING or (headers != headers[0]).any():
            self._raise_from_headers(headers)
        self.counts = np.ascontiguousarray(table[:, self._count_columns])
        if self._forwarded is not None:
            self._relayed = np.ascontiguousarray(self._forwarded.numpy()[:, :, self._count_columns])
        assert self.unique is not None
        sent_ids, words = self.unique.sent_ids, self._deduplication.words_per_id
        if self._sent_along is not None:
            self.values, self._sent_along = self._sent_along(), None
            if len(self.values) != self.counts.sum():
                raise RuntimeError("ranks have sent ids of different batches")
        else:
            self.values = self._send_to_owners(sent_ids.ids, np.ones_like(words))
        if self.training and words.any():
            self._signal_words = self._send_to_owners(sent_ids.signal_words, words)
        self._sent = True

    def _send_to_owners(self, values: npt.NDArray[Any], words: Int64Array) -> torch.Tensor:
        """Starts to send `values` to the owner ranks; an id of table t has `words[t]` elements of `values`."""
        assert self.unique is not None
        send_counts = (self.unique.sent_ids.counts @ words).tolist()
        receive_counts = (self.counts @ words).tolist()
        relayed = None if self._relayed is None else self._relayed @ words
        work, received = self.exchange.ids_all_to_all.to_owners(
            torch.from_numpy(values), send_counts, receive_counts, relayed
        )
        self._works.append(work)
        return received

    def _raise_from_headers(self, headers: Int64Array) -> NoReturn:
        """Raises the error that follows from the headers of all ranks; it is the same on every rank. See `send_ids`."""
        exchange, status = self.exchange, headers[:, 2]
        activities = [
            exchange.describe_activity(number, batch, bool(bits & TRAINING))
            for number, batch, bits, _ in headers.tolist()
        ]
        if (headers[:, :2] != headers[0, :2]).any():
            exchange.batches -= 1  # undone on every rank, so that the batch numbers of each collection match again
            raise exchange.out_of_step_error(activities)
        if (status & ENDED).any():
            raise RanksEndedError
        if (status & FAILED).any():
            exchange.raise_on_all_ranks(self.error)
        if (status != status[0]).any():
            raise exchange.out_of_step_error(activities)
        exchange.raise_difference(activities[0], self._shard.settings.as_text())

    def receive_ids(self) -> None:
        """Waits for the ids that this rank owns; raises the errors of `send_ids`."""
        if self._raised is not None:
            raise self._raised
        if not self._sent:
            self.send_ids()
        if self._received:
            return
        self.exchange.wait("ids", *self._works)
        if self._signal_words is not None:
            latest = self._table.numpy()[:, HEADER : self._count_columns.start]
            self.signals = self._deduplication.received_signals(self.counts, latest, self.values, self._signal_words)
        self.offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(self.counts)]))
        self._received = True

    # ---- prefetched batches

    def add_copy(self, features: KeyedJaggedTensor, values: torch.Tensor | None = None) -> None:
        """Registers `features` as another object with the same batch, such as its copy on a device."""
        self._sources.append(features)

    def matches(self, features: KeyedJaggedTensor) -> bool:
        """Returns whether `features` is one of the registered objects of this batch.

        Objects are compared by identity. Comparing ids could give different results on different ranks.
        """
        return any(features is source for source in self._sources)

    def advance(self) -> None:
        """Runs the next stage of a prefetched batch: sends its ids, or plans the received ids.

        An error is kept, and the forward raises it.
        """
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
        """Returns whether some rank's data ended before this batch; waits for all headers (collective)."""
        if not self._sent:
            self.advance()
        if isinstance(self._raised, RanksEndedError):
            return True
        if self.missing and self._raised is not None:  # there is no forward that would raise this error
            raise self._raised
        return False

    def discard(self) -> None:
        """Discards the prefetched plan, if any, of a batch whose forward has run or will not run."""
        if self._prefetched is not None:
            self._shard.forget(self._prefetched)

    # ---- rows of the ids, and their gradients

    def start_check(self) -> None:
        """Starts a status check: whether all ranks look up the same batch, and whether it failed on any rank."""
        exchange = self.exchange
        activity = exchange.describe_activity(exchange.number, self.batch, self.trains)
        self._check = exchange.start_check(self.error is not None, activity, exchange.group_state.gradients)

    def finish_check(self) -> None:
        """Waits for the status check; if the batch failed, raises the error of the first such rank on all ranks."""
        check, self._check = self._check, None
        if check is not None and self.exchange.finish_check(check):
            self.exchange.raise_on_all_ranks(self.error)

    def send_rows(self, rows: list[list[torch.Tensor]]) -> tuple[list[torch.Tensor], list[Work]]:
        """Starts to send the looked-up rows to the ranks that requested them.

        Args:
            rows: for each embedding dim, the rows of each rank and table, float32 `[n, D]`, in the order of `values`.

        Returns:
            (for each dim, the rows of this rank's distinct ids; the works to wait for before these rows are read)
        """
        self.start_check()
        # Ranks may have exchanged other batches since they sent the ids of this batch, in different orders.
        # Without the check, rows of two batches could be mixed up: wrong values, or a crash of the process.
        if not self.immediate:
            self.finish_check()
        assert self.unique is not None
        sent, requested, relayed = self.unique.host.counts, self.counts, self._relayed
        replicas, received = self._deduplication.replicas, []
        works: list[Work] = []
        for group, part in zip(self._deduplication.groups, rows, strict=True):
            of, to = sent[:, group].sum(axis=1).tolist(), requested[:, group].sum(axis=1).tolist()
            forwarded = None if relayed is None else relayed[:, :, group].sum(axis=2)
            route = Route(to, of, of, to, relayed=forwarded, grads_relayed=forwarded)
            if self.training and replicas.any:
                route = replicas.route(route, sent, requested, relayed, group, self.exchange.device)
            received.append(SendRows.apply(self.exchange, self.batch, route, works, *part))
        for groups in self.exchange.hierarchical:
            groups.start_all()
        self._count_batch(self.unique)
        return received, works

    def receive_rows(self, works: list[Work]) -> None:
        """Waits for the rows that `send_rows` returned; an error of any rank is raised, in repeated calls too."""
        if self._raised is None:
            try:
                self.finish_check()
            except Exception as error:
                self._raised = error
        if self._raised is not None:
            raise self._raised
        self.exchange.wait("rows", *works)

    def _count_batch(self, batch: UniqueBatch) -> None:
        """Adds the batch to the counters that `ShardedCollection.exchange_stats` returns."""
        stats, rank, tables = self.exchange.stats, self.exchange.rank, self._deduplication
        unique, lookups, sent = batch.host.counts, batch.host.lookups, batch.sent_ids.counts
        words = tables.words_per_id if self.training else 0
        stats["lookups"] += int(lookups.sum())
        stats["unique_ids"] += int(unique.sum())
        stats["id_bytes"] += int(((sent.sum(axis=0) - sent[rank]) * (8 + 4 * words)).sum())
        stats["row_bytes"] += int(((unique.sum(axis=0) - unique[rank]) * tables.row_bytes).sum())
        remote_lookups = lookups.sum(axis=0) - lookups[rank]
        stats["bytes_with_duplicates"] += int((remote_lookups * (8 + tables.row_bytes * (1 + self.trains))).sum())


class SendRows(torch.autograd.Function):
    """Autograd function that sends rows to the requesting ranks, and their gradients back to the owners.

    Rows are float32 `[n, D]`, one tensor for each rank and table. The forward appends a work to `works`; wait for it
    before reading the result.
    """

    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, batch: int, route: Route, works: list[Work], *parts: torch.Tensor
    ) -> torch.Tensor:
        sent = parts if route.sent_rows is None else (torch.cat(parts).index_select(0, route.sent_rows),)
        exchange_rows = exchange.rows_all_to_all.rows_from_owners
        try:
            work, received = exchange_rows(sent, route.rows_to, route.rows_from, route.relayed)
        except RuntimeError as error:
            raise exchange.lost_rank_error("rows", error) from error
        works.append(work)
        ctx.exchange, ctx.batch, ctx.route, ctx.sizes = exchange, batch, route, list(map(len, parts))
        return received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        exchange, route, sizes = ctx.exchange, ctx.route, ctx.sizes
        exchange.stats["grad_bytes"] += (sum(route.grads_to) - route.grads_to[exchange.rank]) * grad.shape[1] * 4
        exchange.record_gradients(ctx.batch, grad.shape[1])
        sent = grad.contiguous() if route.grad_rows is None else grad.index_select(0, route.grad_rows)
        exchange_gradients = exchange.rows_all_to_all.gradients_to_owners
        try:
            blocks = exchange_gradients(sent, route.grads_to, route.grads_from, route.grads_relayed)
        except RuntimeError as error:
            raise exchange.lost_rank_error("gradients", error) from error
        grads: list[torch.Tensor] = []
        tables = len(sizes) // len(blocks)
        for first, block in enumerate(blocks):
            grads += block.split(sizes[tables * first : tables * (first + 1)])
        return (None, None, None, None, *grads)


class StageAwaitable(Awaitable[Any]):
    """TorchRec awaitable that runs a function, such as a stage of a batch, and then returns `result`."""

    def __init__(self, stage: Callable[[], None], result: Any) -> None:
        super().__init__()
        self._stage, self._result = stage, result

    @property
    def awaitables(self) -> list[StageAwaitable]:
        """The list in which TorchRec's pipelines look for awaitables; it contains only this one."""
        return [self]

    def _wait_impl(self) -> Any:
        self._stage()
        return self._result
