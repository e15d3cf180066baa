"""Our contenders in the CUDA benchmark, with clocks around the internal functions of a step's phases."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from rec_sdk_torch.tbe import TableBatchedEmbedding
from rec_sdk_torch.tbe.cache.device_cache import Group

from .contenders import Collection, Ours
from .timing import Clock
from .workload import Workload

PHASES = ("plan", "swap", "lookup", "update")
_Result = TypeVar("_Result")


class TimedOurs(Ours):
    """A `TableBatchedEmbedding` with timed phases; the input of a step is ids."""

    group: Group

    def __init__(self, workload: Workload, *args: Any, **options: Any) -> None:
        super().__init__(workload, *args, **options)
        self._time_phases()

    @property
    def embedding(self) -> TableBatchedEmbedding:
        embedding: TableBatchedEmbedding = self.module
        return embedding

    def inputs(self, ids: torch.Tensor) -> torch.Tensor:
        return ids

    def forward(self, batch: Any) -> Any:
        return super().forward(super().inputs(batch) if isinstance(batch, torch.Tensor) else batch)

    def _time_phases(self) -> None:
        """Wraps clocks around the functions of the cache group that a step calls."""
        (self.group,) = self.embedding.groups
        group: Any = self.group
        self._clock = Clock(self.device)
        self._spans: list[tuple[str, Any, Any]] = []
        self._plan_seconds = 0.0
        group.plan = self._timed_plan(group.plan)
        group.stage = self._timed("swap", group.stage)
        group.swap.apply = self._timed("swap", group.swap.apply)
        group.lookup_resident = self._timed("lookup", group.lookup_resident)
        group.update_call = self._timed_update(group.update_call)

    def _timed(self, phase: str, call: Callable[..., _Result]) -> Callable[..., _Result]:
        def timed(*args: Any) -> _Result:
            begin = self._clock.mark()
            try:
                return call(*args)
            finally:
                self._spans.append((phase, begin, self._clock.mark()))

        return timed

    def _timed_update(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """Times `update` and also the call that it returns, which the step executes later."""

        def timed(*args: Any) -> Any:
            call, *arguments = update(*args)
            return self._timed("update", call), *arguments

        return self._timed("update", timed)

    def _timed_plan(self, call: Callable[..., _Result]) -> Callable[..., _Result]:
        """Wraps a wall clock around planning, which runs on the host."""

        def timed(*args: Any) -> _Result:
            begin = time.perf_counter()
            try:
                return call(*args)
            finally:
                self._plan_seconds += time.perf_counter() - begin

        return timed

    def take_phases(self) -> dict[str, float]:
        """Returns the seconds per phase since the last call; waits for the device."""
        self._clock.synchronize()
        taken = dict.fromkeys(PHASES, 0.0)
        taken["plan"] = self._plan_seconds
        for phase, begin, end in self._spans:
            taken[phase] += self._clock.seconds(begin, end)
        self._spans.clear()
        self._plan_seconds = 0.0
        return taken


class TimedCollection(TimedOurs, Collection):
    """An `EmbCacheEmbeddingCollection` with timed phases; its step includes building the KeyedJaggedTensor from ids."""

    @property
    def embedding(self) -> TableBatchedEmbedding:
        _ = self.module.cache_sizes  # passes the optimizers to the tables, before they are built
        embedding: TableBatchedEmbedding = self.module.embedding
        return embedding
