"""Who takes part in a step benchmark: ours here, the rivals in `rivals.py`."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch

from rec_sdk_torch.tbe import BoundsCheckMode, Pooling, TableBatchedEmbedding, TableConfig, TableOptimizer

from .workload import BETAS, EPS, LEARNING_RATE, Workload

CHUNK = 65536
PHASES = ("plan", "swap", "lookup", "update")
_Result = TypeVar("_Result")


class NotAvailableError(Exception):
    """A contender that cannot run here or there; the message says why."""


class Contender(ABC):
    """Tables with an optimizer, ready to train on a workload's batches."""

    name: str

    @abstractmethod
    def step(self, ids: torch.Tensor) -> Any:
        """Forward, backward with the workload's gradient, and update; returns the output as it came.

        ids: int64 `[tables, lookups per table]`.
        """

    @abstractmethod
    def output(self, raw: Any) -> torch.Tensor:
        """What `step` returned, in our layout: `[N, D]` feature after feature, or `[B, tables * D]`."""

    @abstractmethod
    def weights(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        """Current weights of `ids` `[n]`, float32 `[n, D]`."""


def _optimizer(name: str) -> TableOptimizer:
    options: dict[str, Any] = {"lr": LEARNING_RATE}
    if name == "sgd":
        return TableOptimizer.create(torch.optim.SGD, options)
    options["eps"] = EPS
    if name == "adagrad":
        return TableOptimizer.create(torch.optim.Adagrad, options)
    if name == "adam":
        return TableOptimizer.create(torch.optim.SparseAdam, {**options, "betas": BETAS})
    try:
        from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
    except ImportError as error:
        raise NotAvailableError(f"RowWiseAdagrad is a class of torchrec: {error}") from error
    return TableOptimizer.create(RowWiseAdagrad, options)


class Ours(Contender):
    """`TableBatchedEmbedding`, timed phase by phase inside its own step."""

    def __init__(self, workload: Workload, cache: float = 1.0, hashed: bool = True, seed: int = 0) -> None:
        self.name = ("ours" if hashed else "ours-index") + ("" if cache == 1.0 else f"@{cache:g}")
        self.workload = workload
        self.cache = cache
        self._offsets = workload.offsets
        self._grad = workload.gradient(seed)
        pooling = Pooling.SUM if workload.pooled else Pooling.NONE
        tables = [
            TableConfig(f"t{index}", workload.tables.rows, workload.dim, pooling=pooling, hashed=hashed)
            for index in range(workload.tables.count)
        ]
        self.embedding = TableBatchedEmbedding(
            tables,
            optimizer=_optimizer(workload.optimizer),
            cache=cache,
            seed=seed,
            bounds_check_mode=BoundsCheckMode.FATAL,
        )
        self.phase_seconds = dict.fromkeys(PHASES, 0.0)
        (self.group,) = self.embedding.groups
        self._time_phases()

    def _time_phases(self) -> None:
        embedding: Any = self.embedding
        group: Any = self.group
        engine = group.engine
        embedding._swap = self._timed("swap", embedding._swap)
        group.lookup = self._timed("lookup", group.lookup)
        group.update = self._timed("update", group.update)
        group.engine = _TimedEngine(engine, self._timed("plan", engine.plan))

    def _timed(self, phase: str, call: Callable[..., _Result]) -> Callable[..., _Result]:
        def timed(*args: Any) -> _Result:
            begin = time.perf_counter()
            try:
                return call(*args)
            finally:
                self.phase_seconds[phase] += time.perf_counter() - begin

        return timed

    def take_phases(self) -> dict[str, float]:
        """Seconds per phase since the last call; the swap without the plan inside it."""
        taken = dict(self.phase_seconds)
        taken["swap"] -= taken["plan"]
        self.phase_seconds = dict.fromkeys(PHASES, 0.0)
        return taken

    def look(self, ids: torch.Tensor) -> None:
        """Brings rows into the cache and changes none: a training forward without its backward."""
        self.embedding(ids.reshape(-1), self._offsets)

    def fill(self) -> None:
        """Makes every row resident, in order of its id; the cache must hold whole tables."""
        count, rows = self.workload.tables.count, self.workload.tables.rows
        size = max(1, CHUNK // count)
        for begin in range(0, rows, size):
            ids = torch.arange(begin, min(begin + size, rows)).repeat(count)
            self.embedding(ids, torch.arange(len(ids) + 1))

    def chunks(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """All weights as (table, first row, `[n, D]`)."""
        for table in range(self.workload.tables.count):
            for begin in range(0, self.workload.tables.rows, CHUNK):
                end = min(begin + CHUNK, self.workload.tables.rows)
                yield table, begin, self.weights(table, torch.arange(begin, end))

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.embedding(ids.reshape(-1), self._offsets)
        out.backward(self._grad)
        return out

    def output(self, raw: torch.Tensor) -> torch.Tensor:
        return raw

    def weights(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        group, index = self.embedding.find_table(f"t{table}")
        records = group.read_rows(index, np.ascontiguousarray(ids.numpy()))[2]
        return group.layout.weight(records)


class _TimedEngine:
    """An engine whose `plan` is another; everything else is the engine's own."""

    def __init__(self, engine: Any, plan: Callable[..., Any]) -> None:
        self._engine = engine
        self.plan = plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
