"""Training steps of an embedding: planned in order, launched one at a time, updated whole or not at all."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from ..._exits import calls
from ..._forks import Lock, Refusal, free, watch
from ..cache.accumulation import counted
from ..cache.ledger import Ledger
from ..config.optimizer import TableOptimizer
from .gradient_check import GradientGuard
from .monitor import Monitor
from .optimizer_passes import Between

if TYPE_CHECKING:
    from ..cache.device_cache import Group
    from .lookup import BatchLookup
    from .prefetch_queue import LookAhead


class Unfinished(Protocol):
    """What an interrupt can break off: `run` begins again from the start, and does nothing twice.

    Attributes:
        begun: whether anything has changed.
    """

    @property
    def begun(self) -> bool: ...

    def run(self) -> None: ...


class Update:
    """The update of one backward pass, made ready."""

    def __init__(
        self,
        steps: Steps,
        call: BatchLookup,
        grads: Sequence[Sequence[torch.Tensor | None]],
        weights: Sequence[torch.Tensor | None],
    ) -> None:
        groups = call.groups
        self._steps = steps
        self.call = call
        self._grads = grads
        self._weights = weights
        self._windows = counted(steps.windows, (group.accumulate_step for group in groups))
        ended = [group for group in groups if self._windows[group.accumulate_step] >= group.accumulate_step]
        optimizers = {id(optimizer): optimizer for group in ended for optimizer in group.optimizers}.values()
        self._numbers: list[tuple[TableOptimizer, int]] = [(o, o.step + 1) for o in optimizers]
        self._coefficients = {id(group): group.coefficients() for group in ended}
        self._between = Between([o for o in optimizers if o.acts_after_next()], groups)
        self._ledger = Ledger()

    def changes(self, group: Group) -> bool:
        """Whether rows of `group` change, and not only its window."""
        return id(group) in self._coefficients

    @property
    def begun(self) -> bool:
        return not self._ledger.empty()

    def run(self) -> None:
        parts = zip(self.call.groups, self.call.plans, self._grads, self._weights, strict=True)
        for group, plan, grads, weights in parts:
            group.update(plan, grads, weights, self._coefficients.get(id(group)), self._ledger)
        for optimizer, step in self._numbers:
            optimizer.step = step
        self._between.run()
        self._steps.windows = {length: count % length for length, count in self._windows.items()}
        self.call.end(self._ledger)


class Skip:
    """The end of a backward pass that updates nothing."""

    def __init__(self, call: BatchLookup) -> None:
        self._call = call
        self._ledger = Ledger()

    @property
    def begun(self) -> bool:
        return not self._ledger.empty()

    def run(self) -> None:
        self._call.end(self._ledger)


class Steps:
    """What orders the steps of one embedding.

    Attributes:
        planning: held while a batch is planned for all groups, and by who needs that no plan is made meanwhile.
        launch: held while the device is given work of a step. Taken after `planning` where both are.
        saving: held while a save is written, which ends in another thread than it began in.
        store: the folder of rows that are on disk.
        windows: backward passes so far of the accumulation windows of each length.
        guard: what gradients pass before an update.
        ahead: batches that will come.
        monitor: counts of what the steps do.
    """

    def __init__(self, ahead: LookAhead) -> None:
        self.ahead = ahead
        self.planning: Lock = threading.RLock()
        self.launch: Lock = threading.RLock()
        self.saving: Lock = threading.Lock()
        self.store: str | None = None
        self.windows: dict[int, int] = {}
        self.guard = GradientGuard()
        self.monitor = Monitor()
        self._unfinished: Unfinished | None = None
        self._running = threading.RLock()  # held while it runs: it calls what completes it
        self._watched: weakref.WeakSet[BatchLookup] = weakref.WeakSet()
        watch(self)

    def forked(self, parent: int) -> None:
        """In a process that was forked from `parent`: rows on disk stay with it, and what another thread began too."""
        if isinstance(self.launch, Refusal):
            return
        busy = self._busy()
        self.ahead.forked()
        if self.store is not None:
            why = (
                f", which has the rows in host_store {self.store!r}: only that one may train or read these tables. "
                "Save there and load here"
            )
        elif busy:
            why = (
                " while another thread worked on these tables, or saved them: locks and threads do not survive a fork. "
                "Fork when saves have ended, and under exclusive()"
            )
        else:
            return
        refusal = Refusal(f"process {os.getpid()} was forked from process {parent}{why}, or start processes by spawn")
        self.planning = self.launch = self.saving = refusal

    def _busy(self) -> bool:
        """Whether a thread that is not in this process was at work."""
        reads_ahead = not self.ahead.idle and not self.planning._is_owned()
        return reads_ahead or self.saving.locked() or not (free(self.planning) and free(self.launch))

    def check_process(self) -> None:
        """For who takes no lock.

        Raises:
            RuntimeError: this process must not use the tables.
        """
        if isinstance(self.launch, Refusal):
            raise RuntimeError(self.launch.message)

    def complete(self) -> None:
        """Completes what an interrupt broke off. To be called first by whoever takes `launch`.

        Raises:
            RuntimeError: it cannot be completed; the message says why.
        """
        if self._unfinished is None or self._running._is_owned():  # type: ignore[attr-defined]
            return
        try:
            with self._running:
                self._unfinished.run()
        except Exception as error:
            raise RuntimeError(
                f"an earlier update or load was interrupted half-way, and cannot be completed: {error}"
            ) from error
        self._unfinished = None

    def catch_up(self) -> None:
        """`complete`, with all that it may need; costs nothing when there is nothing to do."""
        if self._unfinished is not None:
            with self.alone():
                self.complete()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Both locks, and no plan but those of batches whose forward has begun."""
        with calls, self.planning, self.launch:
            self.ahead.drop()
            yield

    def ends_window(self, groups: Sequence[Group]) -> bool:
        """Whether the next backward pass ends an accumulation window of several."""
        lengths = [group.accumulate_step for group in groups if group.window is not None]
        return bool(lengths) and max(count - length for length, count in counted(self.windows, lengths).items()) >= 0

    def needs_tables(self, groups: Sequence[Group]) -> bool:
        """Whether the next backward pass may do something to whole tables: no plan may be made meanwhile."""
        return (
            self.ends_window(groups)
            or any(group.evicts() for group in groups)
            or any(optimizer.acts_after_next() for group in groups for optimizer in group.optimizers)
        )

    def do(self, work: Unfinished) -> None:
        """Does `work` as a whole: once it has begun, the next call of `complete` does what an interrupt left."""
        self._unfinished = work
        try:
            with self._running:
                work.run()
        except BaseException:
            if not work.begun:
                self._unfinished = None
            raise
        self._unfinished = None

    def left(self, call: BatchLookup) -> bool:
        """Whether the update of `call` waits to be completed."""
        return isinstance(self._unfinished, Update) and self._unfinished.call is call

    def watch(self, call: BatchLookup) -> None:
        """`call` will need its rows as they are now, for its per-sample weights' gradient. Under the launch lock."""
        self._watched.add(call)

    def keep_rows(self, groups: Sequence[Group]) -> None:
        """Keeps rows that forwards have read and will need: they are about to change. Under the launch lock."""
        for call in self._watched:
            for index, group in enumerate(call.groups):
                if group in groups:
                    call.keep_rows(index)

    def skip(self, call: BatchLookup) -> None:
        """Ends `call` without an update: no row, step or window changes."""
        self._watched.discard(call)
        self.do(Skip(call))

    def update(
        self,
        call: BatchLookup,
        grads: Sequence[Sequence[torch.Tensor | None]],
        weights: Sequence[torch.Tensor | None],
    ) -> None:
        """Updates the rows of a backward pass, or adds to the open windows.

        Args:
            call: the forward.
            grads: of each group: that of the pooled output, or one of each feature; float32 without gaps.
            weights: of each group, the per-sample weights.
        """
        update = Update(self, call, grads, weights)
        self._watched.discard(call)
        self.keep_rows([group for group in call.groups if update.changes(group)])
        self.do(update)
