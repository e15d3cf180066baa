"""Batches that will come: they are planned, and their rows are on their way, while others are trained."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch

from ..._engine import Announcement, CacheTooSmallError, policy_looks_ahead
from ...runtime.exits import calls, ending
from ...runtime.warn import PerformanceWarning, warn
from ...runtime.worker import Worker
from ..cache.batch import Batch, Int64Array
from ..cache.plan import Plan
from ..cache.profiler_ranges import profiled
from ..cache.transfers import device_context, download_context
from ..config.lifecycle import IdSignals
from ..rows.frozen import FrozenTables
from ..rows.layout import Layout
from .monitor import Monitor

MAX_DEPTH = 12
"""Batches that may be ahead of the one that is trained."""

MAX_PREFETCHED = 16
"""Batches that may have been prefetched and not come: the engine takes as many announcements."""

LOOKAHEAD_PLANS = 2
"""As many of these are planned under a cache policy that looks ahead. The others are announced to it."""

MAX_UNUSED = 8
"""Training batches in a row that were none of those to come, after which none is planned ahead."""


class Prefetched:
    """A batch that will come.

    Attributes:
        plans: of all groups, once they are made; None while they are not, and after they were dropped.
        announced: to the cache policy, by all groups; empty once it is planned.
    """

    def __init__(
        self,
        values: torch.Tensor,
        offsets: torch.Tensor,
        batch_size: int,
        keys: Int64Array,
        weighted: bool,
        source: object = None,
        joined: bool = False,
        signals: IdSignals | None = None,
        depth: int | None = None,
    ) -> None:
        """
        Args:
            values, offsets, batch_size, keys: as for `Batch.from_tensors`.
            weighted: there will be per-sample weights.
            source: what the batch comes as.
            joined: as of `Batch`.
            signals: what is known of the lookups beside their ids.
            depth: of planning: it is planned beside so many others at the most.
        """
        self.depth = MAX_PREFETCHED if depth is None else depth
        self._signals = signals
        self._tensors = values, offsets
        self._versions = self._versions_now()
        self._shape = batch_size, keys, weighted, joined
        self._copying = download_context(values)
        self._sources: list[tuple[object, torch.Tensor]] = [(source, values)]
        self._full_batch: Batch | None = None
        self._part: tuple[FrozenTables | None, Batch] | None = None
        self.layout: Layout | None = None
        """Has the tables that the batch was announced to."""
        self.plans: list[Plan] | None = None
        self.announced: list[Announcement] | None = None
        self.refused_in_flight: int | None = None
        """Batches in flight when the cache had no room for this one beside them."""
        self.failed = False
        """Its forward will say why."""
        self.forgotten = False
        """It will not come."""

    @property
    def full_batch(self) -> Batch:
        """On the host, as it came; copied there at the first call if it is on a device."""
        if self._full_batch is None:
            batch_size, keys, weighted, joined = self._shape
            with self._copying():
                self._full_batch = Batch.from_tensors(
                    *self._tensors, batch_size, keys, None, weighted, joined, self._signals
                )
        return self._full_batch

    @property
    def batch(self) -> Batch:
        """The part of it that there is a plan of, by the tables that are frozen now."""
        frozen = None if self.layout is None else self.layout.frozen
        part = self._part
        if part is None or part[0] is not frozen:
            given = self.full_batch
            part = self._part = frozen, given if self.layout is None else self.layout.planned_part(given, frozen)
        return part[1]

    def has_source(self, source: object, values: torch.Tensor) -> bool:
        """Whether the batch comes as `source`, with these ids, and they are unchanged."""
        return any(source is s and values is v for s, v in self._sources) and self._unchanged()

    def add_source(self, source: object, values: torch.Tensor) -> None:
        """The batch may come as `source`, a copy of it."""
        self._sources.append((source, values))

    def matches(self, batch: Batch) -> bool:
        """Whether its plans are plans of `batch`."""
        if self.forgotten or not self._unchanged():
            return False
        try:
            return self.batch.same_plan(batch)
        except (TypeError, ValueError):  # its own forward raises it
            return False

    def _unchanged(self) -> bool:
        return self._versions_now() == self._versions

    def _versions_now(self) -> list[int]:
        """Numbers that change when a tensor of the batch is written to; tensors of inference mode do not count."""
        versions = []
        for tensor in self._tensors if self._signals is None else (*self._tensors, *self._signals):
            if tensor is not None:
                versions.append(0 if tensor.is_inference() else tensor._version)
        return versions


class PrefetchQueue:
    """The batches that will come to one embedding, in order, and the thread that plans them.

    Weights have the bits that they have without it: plans are made in the order of the forwards, and a plan whose
    forward has not begun leaves no trace when it is dropped. Work on whole tables, and another training
    batch, drop the plans; batches that are still to come are planned anew.

    Attributes:
        idle: nothing is planned now.
        expected: the most batches that were to come at once.
    """

    def __init__(self, layout: Layout, monitor: Monitor, may_plan: Callable[[], bool]) -> None:
        """
        Args:
            layout: has the tables.
            monitor: counts.
            may_plan: a method that says whether training batches can be planned now; its object is not kept alive.
        """
        self._layout = layout
        self._locks = layout.locks
        self._monitor = monitor
        self._may_plan = weakref.WeakMethod(may_plan)
        self._looks_ahead = policy_looks_ahead(layout.options.cache_policy)
        layout.locks.plan_ahead(self)
        self._queued: deque[Prefetched] = deque()  # those with plans before those without
        self._lock = threading.RLock()  # of `_queued` and `plans`; taken after the embedding's
        self._worker = Worker("rec_sdk_torch.prefetch")
        self.idle = True
        self._too_small = self._warned_too_small = self._warned_unused = False
        self._evaluating = False  # what was prefetched is not trained
        self.max_queued = 1
        self._unused = 0  # training batches in a row that were none of those to come

    def __len__(self) -> int:
        return len(self._queued)

    def after_fork(self) -> None:
        """In a process that was forked: the thread that planned is not there."""
        self._lock = threading.RLock()
        self.idle = True

    def batches_to_hold(self) -> int:
        """Batches whose rows the caches should hold at once: the one that is trained, and those that are planned."""
        return min(self.max_queued, LOOKAHEAD_PLANS + 1) if self._looks_ahead else self.max_queued

    # ---- batches

    def batch(
        self,
        source: object,
        values: torch.Tensor,
        offsets: torch.Tensor,
        batch_size: int,
        keys: Int64Array,
        weights: torch.Tensor | None,
        joined: bool = False,
        signals: IdSignals | None = None,
    ) -> Batch:
        """`Batch.from_tensors`; ids on a device that were prefetched from `source` are on the host already."""
        if not values.is_cpu:
            prefetched = next((each for each in tuple(self._queued) if each.has_source(source, values)), None)
            if prefetched is not None:
                known = prefetched.full_batch
                values, offsets = torch.from_numpy(known.values), torch.from_numpy(known.offsets)
                signals = IdSignals(*(None if array is None else torch.from_numpy(array) for array in known.signals))
        batch = Batch.from_tensors(values, offsets, batch_size, keys, weights, joined=joined, signals=signals)
        padding_ids = self._layout.padding_ids
        return batch if padding_ids is None else padding_ids.remove_from(batch)

    # ---- plans

    def take(self, batch: Batch) -> list[Plan]:
        """The plans of a batch whose forward is now, made ahead or now."""
        begin = time.perf_counter_ns()
        plans = None
        if self._queued:
            with self._lock:
                plans = self._pop(batch)
        if plans is None:
            with self._locks.planning:
                plans = (self._pop_or_drop(batch) if self._queued else None) or self._plan(batch)
        self._monitor.wait_ns += time.perf_counter_ns() - begin
        self._evaluating = False
        for group, plan in zip(self._layout.built, plans, strict=True):
            if group.warns:
                group.warn(plan)
        if self._too_small or self._unused >= MAX_UNUSED:
            self._warn()
        return plans

    def _warn(self) -> None:
        if self._too_small and not self._warned_too_small:
            self._warned_too_small = True
            warn(
                "the device cache does not hold the rows of all batches that were prefetched: they are planned less "
                "far ahead (a larger cache= or a smaller depth= ends this)",
                PerformanceWarning,
            )
        if self._unused >= MAX_UNUSED and not self._warned_unused:
            self._warned_unused = True
            names = [table.name for table in self._layout.tables]
            warn(
                f"tables {names}: the last {self._unused} training batches were none of those that were prefetched, "
                "and their plans were made in vain; nothing is planned ahead until one of them comes. Where the model "
                "changes the ids of a batch, do that before prefetch(), or in its features=",
                PerformanceWarning,
            )

    def _plan(self, batch: Batch, announced: Sequence[Announcement] = ()) -> list[Plan]:
        """The plans of all groups or, after an exception, of none. Under the planning lock."""
        plans: list[Plan] = []
        try:
            for group, announcement in zip_longest(self._layout.built, announced):
                begin = time.perf_counter_ns()
                with profiled("plan"):
                    plans.append(group.plan(batch, announcement))
                self._monitor.plan_ns += time.perf_counter_ns() - begin
        except BaseException as error:
            self._cancel(plans)
            backwards = self._layout.pending_gradients.backward_passes
            if isinstance(error, CacheTooSmallError) and backwards:
                error.add_note(
                    f"{backwards} backward passes wait for step() of the optimizer, and hold their rows in the cache"
                )
            raise
        return plans

    def _cancel(self, plans: Sequence[Plan]) -> None:
        """Ends the plans of a batch that did not begin, the newest that has some."""
        for group, plan in zip(reversed(self._layout.built[: len(plans)]), reversed(plans), strict=True):
            group.swap.drop(plan)

    # ---- coming and going

    @calls
    def add(self, prefetched: Prefetched) -> None:
        """A batch is to come, after those that were added before.

        Raises:
            RuntimeError: `MAX_PREFETCHED` are to come already, or this process must not use the tables.
        """
        self._locks.check_process()
        prefetched.layout = self._layout
        with self._lock:
            if sum(not other.forgotten for other in self._queued) >= MAX_PREFETCHED:
                raise RuntimeError(
                    f"{MAX_PREFETCHED} batches were prefetched and have not come: run their forward, or forget() them"
                )
            self._queued.append(prefetched)
            self.max_queued = max(self.max_queued, min(len(self._queued), prefetched.depth + 1))
            planned = self._queued[0].plans is not None
        if not planned:  # otherwise once the next forward is launched: it would wait for the engine
            self.plan_next()

    def _pop_or_drop(self, batch: Batch) -> list[Plan] | None:
        """The plans of a training batch. None if it has none: then no other has one either. Under the planning lock."""
        with self._lock:
            plans = self._pop(batch)
            if plans is None:
                self._drop_plans()
                self._unused = (
                    0 if self._remove_through(batch) or self._evaluating else self._unused + bool(self._queued)
                )
            return plans

    def remove_read(self, batch: Batch) -> None:
        """A batch that is not trained has come; there are no plans, which it would not need."""
        if self._queued:
            with self._lock:
                self._evaluating |= self._remove_through(batch)

    def _remove_through(self, batch: Batch) -> bool:
        """Whether the batch was to come. It is not any more, nor are those before it."""
        coming = tuple(self._queued)
        place = next((i for i, prefetched in enumerate(coming) if prefetched.matches(batch)), -1)
        self._queued = deque(prefetched for prefetched in coming[place + 1 :] if not prefetched.forgotten)
        return place >= 0

    def _pop(self, batch: Batch) -> list[Plan] | None:
        if not self._queued or self._queued[0].plans is None or not self._queued[0].matches(batch):
            return None
        plans = self._queued[0].plans
        self._queued.popleft().plans = None
        self._unused = 0
        return plans

    def remove(self, prefetched: Prefetched | None) -> None:
        """The batch will not come; with None, none of those that were added will."""
        removed = [other for other in tuple(self._queued) if prefetched is None or other is prefetched]
        for other in removed:
            other.forgotten = True
        planning = self._locks.planning
        if not removed or self._lock._is_owned() or planning._is_owned():  # type: ignore[attr-defined]
            return  # the garbage collector calls in the middle of something: the next call does the rest
        with planning, self._lock:
            planned = [other for other in self._queued if other.forgotten and other.plans is not None]
            if planned:
                self._drop_plans(after=planned[0])
            self._queued = deque(other for other in self._queued if not other.forgotten)

    def drop(self) -> None:
        """Drops all plans, which leave no trace. Under the planning lock; the batches are still to come."""
        if self._queued:
            with self._lock:
                self._drop_plans()

    def _drop_plans(self, after: Prefetched | None = None) -> None:
        """Drops the plans of the batches from `after` on."""
        for prefetched in reversed(tuple(self._queued)):
            # Taken away first: after an interrupt, plans without a reference undo themselves.
            plans, prefetched.plans = prefetched.plans, None
            prefetched.announced = None
            if plans is not None:
                self._cancel(plans)
            if prefetched is after:
                break

    # ---- planning ahead

    def plan_next(self) -> None:
        """Plans what is to come and can be planned now, in the thread for it."""
        if not self._queued or not self.idle or ending():
            return
        with self._lock:
            if self.idle and (self._next_to_plan() or self._next_to_announce()) is not None:
                self._worker.run(self._plan_all)
                self.idle = False

    def wait(self) -> None:
        """Until all that can be planned now is planned, and its rows are on their way."""
        if self._queued:
            self.plan_next()
            self._worker.wait()

    def _next_to_plan(self) -> Prefetched | None:
        if not self._can_plan():
            return None
        prefetched, planned = None, 0
        for other in tuple(self._queued):
            if other.plans is not None:
                planned += 1
            elif prefetched is None and not other.forgotten:
                prefetched = other
        if prefetched is None or prefetched.failed:
            return None
        if planned >= (LOOKAHEAD_PLANS if self._looks_ahead else prefetched.depth + 1):
            return None
        refused = prefetched.refused_in_flight
        return prefetched if refused is None or self._layout.in_flight() < refused else None

    def _can_plan(self) -> bool:
        may_plan = self._may_plan()
        return may_plan is not None and may_plan() and not self._evaluating and self._unused < MAX_UNUSED

    def _next_to_announce(self) -> Prefetched | None:
        """Under a policy that looks ahead, once all is planned that can be."""
        if not self._looks_ahead or not self._can_plan():
            return None
        waiting = (p for p in tuple(self._queued) if p.plans is None and not p.forgotten and not p.failed)
        return next((prefetched for prefetched in waiting if prefetched.announced is None), None)

    def _announce(self, prefetched: Prefetched) -> None:
        announced: list[Announcement] = []
        with contextlib.suppress(Exception), self._locks.planning:  # without, it is planned all the same
            if self._next_to_announce() is prefetched:
                announced = [group.announce(prefetched.batch) for group in self._layout.built]
        prefetched.announced = announced

    def _plan_all(self) -> None:
        try:
            while True:
                with self._lock:
                    prefetched, announces = self._next_to_plan(), self._next_to_announce()
                    if prefetched is None and announces is None:
                        self.idle = True  # under the lock: a thread that adds a batch sees it
                        return
                if prefetched is not None:
                    self._prepare(prefetched)
                elif announces is not None:
                    self._announce(announces)
        finally:
            self.idle = True

    def _prepare(self, prefetched: Prefetched) -> None:
        """Errors are not raised here: the batch's forward meets them again, when nothing else is in its way."""
        with device_context(self._layout.device):
            plans = self._plan_ahead(prefetched)
            if plans is not None:
                with contextlib.suppress(Exception), profiled("read_ahead"):
                    for group, plan in zip(self._layout.built, plans, strict=True):
                        group.read_ahead(plan)

    def _plan_ahead(self, prefetched: Prefetched) -> Sequence[Plan] | None:
        try:
            _ = prefetched.batch
        except Exception:
            prefetched.failed = True
            return None
        with self._locks.planning:
            if self._next_to_plan() is not prefetched:  # it came meanwhile
                return None
            try:
                plans = self._plan(prefetched.batch, prefetched.announced or ())
            except CacheTooSmallError:
                prefetched.refused_in_flight = self._layout.in_flight()
                self._too_small |= prefetched.refused_in_flight > 0
                return None
            except Exception:
                prefetched.failed = True
                return None
            with self._lock:
                prefetched.plans, prefetched.announced = plans, []
                planned = sum(other.plans is not None for other in self._queued)
            self._monitor.depth_reached = max(self._monitor.depth_reached, planned)
            return plans
