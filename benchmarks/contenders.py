"""Who takes part in a step benchmark: ours here, the rivals in `rivals.py`."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch

from rec_sdk_torch.tbe import BoundsCheckMode, Pooling, TableBatchedEmbedding, TableConfig, TableOptimizer

from .timing import Clock
from .workload import BETAS, EPS, LEARNING_RATE, Workload

CHUNK = 65536
PHASES = ("plan", "swap", "lookup", "update")
_Result = TypeVar("_Result")
HOST = torch.device("cpu")


class NotAvailableError(Exception):
    """A contender that cannot run here or there; the message says why."""


class Contender(ABC):
    """Tables with an optimizer, ready to train on a workload's batches."""

    name: str

    @abstractmethod
    def forward(self, ids: torch.Tensor) -> Any:
        """Looks up int64 `[tables, lookups per table]`; returns the output as it comes."""

    @abstractmethod
    def backward(self, raw: Any) -> None:
        """Backward of an output of `forward`, with the workload's gradient, and update."""

    def step(self, ids: torch.Tensor) -> Any:
        """Both; returns the output."""
        raw = self.forward(ids)
        self.backward(raw)
        return raw

    @abstractmethod
    def output(self, raw: Any) -> torch.Tensor:
        """What `forward` returned, in our layout: `[N, D]` feature after feature, or `[B, tables * D]`."""

    @abstractmethod
    def weights(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        """Current weights of `ids` `[n]`, float32 `[n, D]`."""


def table_optimizer(name: str) -> TableOptimizer:
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

    def __init__(
        self,
        workload: Workload,
        cache: float = 1.0,
        hashed: bool = True,
        seed: int = 0,
        device: torch.device = HOST,
        grad: torch.Tensor | None = None,
    ) -> None:
        """`grad` is the gradient of the output when others share it."""
        self.name = ("ours" if hashed else "ours-index") + ("" if cache == 1.0 else f"@{cache:g}")
        self.workload = workload
        self.cache = cache
        self.hashed = hashed
        self.seed = seed
        self.device = device
        self._offsets = workload.offsets
        self._grad = workload.gradient(seed).to(device) if grad is None else grad
        self.embedding = self._make_embedding()
        (self.group,) = self.embedding.groups
        self.engine = self.group.swap.engine
        self._clock = Clock(device)
        self._spans: list[tuple[str, Any, Any]] = []
        self._swap_begin: Any = None
        self._plan_seconds = 0.0
        self._time_phases()

    def _make_embedding(self) -> TableBatchedEmbedding:
        pooling = Pooling.SUM if self.workload.pooled else Pooling.NONE
        tables = [
            TableConfig(f"t{index}", self.workload.tables.rows, self.workload.dim, pooling=pooling, hashed=self.hashed)
            for index in range(self.workload.tables.count)
        ]
        return TableBatchedEmbedding(
            tables,
            optimizer=table_optimizer(self.workload.optimizer),
            cache=self.cache,
            seed=self.seed,
            device=self.device,
            bounds_check_mode=BoundsCheckMode.FATAL,
        )

    def _time_phases(self) -> None:
        embedding: Any = self.embedding
        group: Any = self.group
        embedding._swap = self._timed_swap(embedding._swap)
        group.lookup = self._timed("lookup", group.lookup)
        group.update = self._timed("update", group.update)
        group.swap.engine = _TimedEngine(self.engine, self._timed_plan)

    def _timed(self, phase: str, call: Callable[..., _Result]) -> Callable[..., _Result]:
        def timed(*args: Any) -> _Result:
            begin = self._clock.mark()
            try:
                return call(*args)
            finally:
                self._spans.append((phase, begin, self._clock.mark()))

        return timed

    def _timed_swap(self, call: Callable[..., _Result]) -> Callable[..., _Result]:
        def timed(*args: Any) -> _Result:
            self._swap_begin = self._clock.mark()
            try:
                return call(*args)
            finally:
                self._spans.append(("swap", self._swap_begin, self._clock.mark()))

        return timed

    def _timed_plan(self, *args: Any) -> Any:
        """The plan of a batch, which is work of the host inside of a swap."""
        self._spans.append(("swap", self._swap_begin, self._clock.mark()))
        begin = time.perf_counter()
        try:
            return self.engine.plan(*args)
        finally:
            self._plan_seconds += time.perf_counter() - begin
            self._swap_begin = self._clock.mark()

    def take_phases(self) -> dict[str, float]:
        """Seconds per phase since the last call; the swap without the plan inside it. Waits for the device."""
        self._clock.synchronize()
        taken = dict.fromkeys(PHASES, 0.0)
        taken["plan"] = self._plan_seconds
        for phase, begin, end in self._spans:
            taken[phase] += self._clock.seconds(begin, end)
        self._spans.clear()
        self._plan_seconds = 0.0
        return taken

    def plan(self, ids: torch.Tensor) -> Any:
        """The engine's plan of a batch, which pins its rows until it is released; its swap is the caller's."""
        values, keys = np.ascontiguousarray(ids.reshape(-1).numpy()), np.arange(len(ids), dtype=np.int64)
        return self.engine.plan(values, self._offsets.numpy(), keys, self.workload.batch_size)

    def look(self, ids: torch.Tensor) -> None:
        """Brings rows into the cache and changes none: a training forward without its backward."""
        self.forward(ids)

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

    def forward(self, ids: torch.Tensor) -> Any:
        return self.embedding(ids.reshape(-1), self._offsets)

    def backward(self, raw: Any) -> None:
        raw.backward(self._grad)

    def output(self, raw: Any) -> torch.Tensor:
        result: torch.Tensor = raw
        return result

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
