"""The prefetch queue, which plans future batches and copies their missing rows while the current batch is trained."""

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
"""The largest `depth` of a prefetching loop: the number of batches ahead of the one that is trained."""

MAX_PREFETCHED = 16
"""Capacity of the queue in batches. The engine accepts as many announcements."""

LOOKAHEAD_PLANS = 2
"""Number of batches that are planned ahead if the cache policy looks ahead. Later batches are only announced."""

MAX_UNUSED = 8
"""Number of consecutive training batches that were not prefetched after which planning ahead stops."""


class Prefetched:
    """A batch in the prefetch queue: its tensors and, once the batch is planned, its plans.

    Attributes:
        plans: one plan for each group; None before the batch is planned and after its plans have been dropped.
        announced: the batch's announcements to the cache policy, one for each group; empty once it is planned.
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
        """Creates an unplanned batch, whose tensors must not change before the forward.

        Args:
            values, offsets, batch_size, keys, joined: see `Batch.from_tensors`.
            weighted: whether the forward will have per-sample weights.
            source: an object that the forward will also get, such as the offsets, and by which it recognizes the batch.
            signals: shows, clicks and timestamps of the ids.
            depth: the batch is planned while at most this many batches before it are planned; None: no limit.
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
        """The tables whose queue holds the batch."""
        self.plans: list[Plan] | None = None
        self.announced: list[Announcement] | None = None
        self.refused_in_flight: int | None = None
        """Number of batches in flight when the cache was too small for this one; it is planned again with fewer."""
        self.failed = False
        """Whether planning raised an error. The batch's forward plans again and raises the error."""
        self.forgotten = False
        """Whether the batch was removed from the queue by `forget`."""

    @property
    def full_batch(self) -> Batch:
        """The batch in host memory, with the lookups of all tables; the first access copies tensors from a device."""
        if self._full_batch is None:
            batch_size, keys, weighted, joined = self._shape
            with self._copying():
                self._full_batch = Batch.from_tensors(
                    *self._tensors, batch_size, keys, None, weighted, joined, self._signals
                )
        return self._full_batch

    @property
    def batch(self) -> Batch:
        """The part of the batch that is planned: lookups of padding ids and of presently frozen tables are left out."""
        frozen = None if self.layout is None else self.layout.frozen
        part = self._part
        if part is None or part[0] is not frozen:
            full = self.full_batch
            part = self._part = (
                frozen,
                full if self.layout is None else self.layout.without_padding_and_frozen(full, frozen),
            )
        return part[1]

    def has_source(self, source: object, values: torch.Tensor) -> bool:
        """Returns whether `source` and `values` belong to this batch, and its tensors are still unchanged."""
        return any(source is s and values is v for s, v in self._sources) and self._unchanged()

    def add_copy(self, source: object, values: torch.Tensor) -> None:
        """Adds another pair of objects by which the batch is recognized, such as objects of its copy on a device."""
        self._sources.append((source, values))

    def matches(self, batch: Batch) -> bool:
        """Returns whether `batch` has the same ids, so that the plans of this object fit it."""
        if self.forgotten or not self._unchanged():
            return False
        try:
            return self.batch.same_plan(batch)
        except (TypeError, ValueError):  # the batch is invalid; its own forward raises the error
            return False

    def _unchanged(self) -> bool:
        return self._versions_now() == self._versions

    def _versions_now(self) -> list[int]:
        """Returns autograd's version counters of the tensors, which each write increases; 0 for inference tensors."""
        versions = []
        for tensor in self._tensors if self._signals is None else (*self._tensors, *self._signals):
            if tensor is not None:
                versions.append(0 if tensor.is_inference() else tensor._version)
        return versions


class PrefetchQueue:
    """The prefetched batches of one embedding, in the order of their forwards, and the thread that plans them.

    Prefetching changes no bit of the weights: plans are made in the order of the forwards, and until its forward
    starts, a plan can be dropped without any effect. Work on whole tables, and training batches that were not
    prefetched, drop the plans; the queue then plans its batches again.

    Attributes:
        idle: whether the planning thread has nothing to do.
        max_queued: the largest number of batches so far that the cache has to hold at once.
    """

    def __init__(self, layout: Layout, monitor: Monitor, may_plan: Callable[[], bool]) -> None:
        """Creates an empty queue; the planning thread starts with the first batch.

        Args:
            layout: the tables.
            monitor: counters of plans and waiting times.
            may_plan: a method that returns whether training batches can be planned now. The queue has only a weak
                reference to the method's object.
        """
        self._layout = layout
        self._locks = layout.locks
        self._monitor = monitor
        self._may_plan = weakref.WeakMethod(may_plan)
        self._looks_ahead = policy_looks_ahead(layout.options.cache_policy)
        layout.locks.register_queue(self)
        self._queued: deque[Prefetched] = deque()  # planned batches come before unplanned batches
        # This lock guards `_queued` and `plans`. It is acquired after the embedding's locks.
        self._lock = threading.RLock()
        self._worker = Worker("rec_sdk_torch.prefetch")
        self.idle = True
        self._too_small = self._warned_too_small = self._warned_unused = False
        self._evaluating = False  # whether the latest prefetched batch was looked up without training
        self.max_queued = 1
        self._unused = 0  # number of consecutive training batches that were not prefetched

    def __len__(self) -> int:
        return len(self._queued)

    def after_fork(self) -> None:
        """Replaces the lock and marks the queue idle, since a forked process lacks its parent's planning thread."""
        self._lock = threading.RLock()
        self.idle = True

    def batches_to_hold(self) -> int:
        """Returns how many batches the cache has to hold at once: the batch that is trained and the planned batches."""
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
        """Returns the `Batch` of a forward, without padding ids.

        If `values` are on a device and were prefetched from `source`, the queue's copy in host memory is used.
        """
        if not values.is_cpu:
            prefetched = next((each for each in tuple(self._queued) if each.has_source(source, values)), None)
            if prefetched is not None:
                full = prefetched.full_batch
                values, offsets = torch.from_numpy(full.values), torch.from_numpy(full.offsets)
                signals = IdSignals(*(None if array is None else torch.from_numpy(array) for array in full.signals))
        batch = Batch.from_tensors(values, offsets, batch_size, keys, weights, joined=joined, signals=signals)
        padding_ids = self._layout.padding_ids
        return batch if padding_ids is None else padding_ids.remove_from(batch)

    # ---- plans

    def take(self, batch: Batch) -> list[Plan]:
        """Returns the plans of the batch whose forward runs now: prefetched plans if they fit, else new ones."""
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
                "the device cache is too small for the rows of all prefetched batches, so fewer are planned ahead. "
                "Enlarge cache=, or reduce depth=",
                PerformanceWarning,
            )
        if self._unused >= MAX_UNUSED and not self._warned_unused:
            self._warned_unused = True
            names = [table.name for table in self._layout.tables]
            warn(
                f"tables {names}: the last {self._unused} training batches were not the prefetched ones, whose plans "
                "were wasted; nothing is planned ahead until a prefetched batch is trained. If the model changes the "
                "ids of a batch, change them before prefetch(), or in its features=",
                PerformanceWarning,
            )

    def _plan(self, batch: Batch, announced: Sequence[Announcement] = ()) -> list[Plan]:
        """Plans the batch for every group, or for none if one raises. The caller holds the planning lock."""
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
                    f"{backwards} backward passes are pending for step() of the optimizer, and pin rows in the cache"
                )
            raise
        return plans

    def _cancel(self, plans: Sequence[Plan]) -> None:
        """Drops the plans of a batch whose forward has not started. No later batch may have plans at this time."""
        for group, plan in zip(reversed(self._layout.built[: len(plans)]), reversed(plans), strict=True):
            group.swap.drop(plan)

    # ---- the queue

    @calls
    def add(self, prefetched: Prefetched) -> None:
        """Appends a batch to the queue; starts the planning thread unless the first queued batch is already planned.

        Raises:
            RuntimeError: the queue is full (`MAX_PREFETCHED`), or this process must not use the tables.
        """
        self._locks.check_process()
        prefetched.layout = self._layout
        with self._lock:
            if sum(not other.forgotten for other in self._queued) >= MAX_PREFETCHED:
                raise RuntimeError(
                    f"{MAX_PREFETCHED} batches are prefetched already: run their forward, or forget() them"
                )
            self._queued.append(prefetched)
            self.max_queued = max(self.max_queued, min(len(self._queued), prefetched.depth + 1))
            planned = self._queued[0].plans is not None
        # Otherwise the next forward starts the thread: planning now would make that forward wait for the engine.
        if not planned:
            self.plan_next()

    def _pop_or_drop(self, batch: Batch) -> list[Plan] | None:
        """Returns the prefetched plans of a training batch; if it has none, drops all plans and returns None.

        The caller holds the planning lock.
        """
        with self._lock:
            plans = self._pop(batch)
            if plans is None:
                self._drop_plans()
                self._unused = (
                    0 if self._remove_through(batch) or self._evaluating else self._unused + bool(self._queued)
                )
            return plans

    def remove_read(self, batch: Batch) -> None:
        """Removes a batch that is looked up without training, and all batches before it, from the queue."""
        if self._queued:
            with self._lock:
                self._evaluating |= self._remove_through(batch)

    def _remove_through(self, batch: Batch) -> bool:
        """Removes the batch and all batches before it from the queue; returns whether it was there."""
        queued = tuple(self._queued)
        index = next((i for i, prefetched in enumerate(queued) if prefetched.matches(batch)), -1)
        self._queued = deque(prefetched for prefetched in queued[index + 1 :] if not prefetched.forgotten)
        return index >= 0

    def _pop(self, batch: Batch) -> list[Plan] | None:
        if not self._queued or self._queued[0].plans is None or not self._queued[0].matches(batch):
            return None
        plans = self._queued[0].plans
        self._queued.popleft().plans = None
        self._unused = 0
        return plans

    def remove(self, prefetched: Prefetched | None) -> None:
        """Removes a batch (None: every batch) from the queue, and drops its plans and the plans of later batches."""
        removed = [other for other in tuple(self._queued) if prefetched is None or other is prefetched]
        for other in removed:
            other.forgotten = True
        planning = self._locks.planning
        if not removed or self._lock._is_owned() or planning._is_owned():  # type: ignore[attr-defined]
            return  # the garbage collector called this inside another call, which removes the batch later
        with planning, self._lock:
            planned = [other for other in self._queued if other.forgotten and other.plans is not None]
            if planned:
                self._drop_plans(after=planned[0])
            self._queued = deque(other for other in self._queued if not other.forgotten)

    def drop(self) -> None:
        """Drops all plans; the batches stay in the queue. The caller holds the planning lock."""
        if self._queued:
            with self._lock:
                self._drop_plans()

    def _drop_plans(self, after: Prefetched | None = None) -> None:
        """Drops, newest first, the plans of the batches from `after` to the last; by default, of all batches."""
        for prefetched in reversed(tuple(self._queued)):
            # The reference is removed first: after an interrupt here, the plans cancel themselves when deleted.
            plans, prefetched.plans = prefetched.plans, None
            prefetched.announced = None
            if plans is not None:
                self._cancel(plans)
            if prefetched is after:
                break

    # ---- planning ahead

    def plan_next(self) -> None:
        """Starts the planning thread if a batch of the queue can be planned or announced now."""
        if not self._queued or not self.idle or ending():
            return
        with self._lock:
            if self.idle and (self._next_to_plan() or self._next_to_announce()) is not None:
                self._worker.run(self._plan_all)
                self.idle = False

    def wait(self) -> None:
        """Blocks until every plannable batch is planned and its copies have started."""
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
        """Returns the next batch to announce to a cache policy that looks ahead; None for other policies."""
        if not self._looks_ahead or not self._can_plan():
            return None
        unplanned = (p for p in tuple(self._queued) if p.plans is None and not p.forgotten and not p.failed)
        return next((prefetched for prefetched in unplanned if prefetched.announced is None), None)

    def _announce(self, prefetched: Prefetched) -> None:
        announced: list[Announcement] = []
        # Errors are ignored, since a batch can be planned without an announcement.
        with contextlib.suppress(Exception), self._locks.planning:
            if self._next_to_announce() is prefetched:
                announced = [group.announce(prefetched.batch) for group in self._layout.built]
        prefetched.announced = announced

    def _plan_all(self) -> None:
        try:
            while True:
                with self._lock:
                    prefetched, announces = self._next_to_plan(), self._next_to_announce()
                    if prefetched is None and announces is None:
                        self.idle = True  # set under the lock: a thread that adds a batch later starts planning
                        return
                if prefetched is not None:
                    self._plan_and_stage(prefetched)
                elif announces is not None:
                    self._announce(announces)
        finally:
            self.idle = True

    def _plan_and_stage(self, prefetched: Prefetched) -> None:
        """Plans a batch and stages its missing rows. Errors are suppressed here: the batch's forward raises them."""
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
            if self._next_to_plan() is not prefetched:  # its forward ran meanwhile
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
