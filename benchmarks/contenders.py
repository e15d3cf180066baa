"""Contenders of this package in a step benchmark, using public names only; other libraries are in `rivals.py`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rec_sdk_torch.tbe import (
    BoundsCheckMode,
    InitializerType,
    Pooling,
    TableBatchedEmbedding,
    TableConfig,
    TableOptimizer,
)

from .tables import NotAvailableError, configs, import_torchrec, make_collection
from .workload import BETAS, EPS, LEARNING_RATE, Workload

CHUNK = 65536
HOST = torch.device("cpu")


class Contender(ABC):
    """Tables with an optimizer that train on a workload's batches."""

    name: str

    def inputs(self, ids: torch.Tensor) -> Any:
        """Builds the arguments of `forward`, as a data loader would, from int64 `[tables, lookups per table]`; not
        timed.
        """
        return ids

    @abstractmethod
    def forward(self, batch: Any) -> Any:
        """Runs the forward pass on arguments built by `inputs`; returns the raw output."""

    @abstractmethod
    def backward(self, raw: Any) -> None:
        """Runs the backward pass from an output of `forward` with the workload's gradient, then updates the rows."""

    def step(self, ids: torch.Tensor) -> Any:
        """Runs forward, backward and update; returns the raw output."""
        raw = self.forward(self.inputs(ids))
        self.backward(raw)
        return raw

    @abstractmethod
    def output(self, raw: Any) -> torch.Tensor:
        """Converts a raw output to one layout: `[N, D]` feature after feature, or `[B, dims of all tables]`."""

    @abstractmethod
    def weights(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        """Returns the current weights of `ids` `[n]`, float32 `[n, D]`."""


def optimizer_of(name: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Returns the class and keyword arguments of one of the OPTIMIZERS.

    Raises:
        NotAvailableError: the optimizer's class cannot be imported.
    """
    options: dict[str, Any] = {"lr": LEARNING_RATE}
    if name == "sgd":
        return torch.optim.SGD, options
    options["eps"] = EPS
    if name == "adagrad":
        return torch.optim.Adagrad, options
    if name == "adam":
        return torch.optim.SparseAdam, {**options, "betas": BETAS}
    try:
        from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
    except ImportError as error:
        raise NotAvailableError(f"RowWiseAdagrad is a class of torchrec: {error}") from error
    return RowWiseAdagrad, options


class JaggedContender(Contender):
    """A contender whose batches are KeyedJaggedTensors.

    A sequence returns one tensor per feature, and each has its own gradient, as in a model. A pooled output is one
    tensor of all features.
    """

    workload: Workload
    module: Any
    _grads: list[torch.Tensor]

    def _batch(self, values: torch.Tensor, lengths: torch.Tensor) -> Any:
        keys = [f"f{index}" for index in range(self.workload.tables.count)]
        return import_torchrec().KeyedJaggedTensor(keys=keys, values=values, lengths=lengths)

    def inputs(self, ids: torch.Tensor) -> Any:
        return self._batch(ids.reshape(-1), self.workload.lengths)

    def forward(self, batch: Any) -> list[torch.Tensor]:
        result, keys = self.module(batch), batch.keys()
        return [result.values()] if self.workload.pooled else [result[key].values() for key in keys]

    def backward(self, raw: list[torch.Tensor]) -> None:
        torch.autograd.backward(raw, self._grads)

    def output(self, raw: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(raw)


class Ours(Contender):
    """`TableBatchedEmbedding`: ids and offsets as input, one output and one gradient for all features."""

    kind = "ours"
    module: Any

    def __init__(
        self,
        workload: Workload,
        cache: float = 1.0,
        hashed: bool = True,
        seed: int = 0,
        device: torch.device = HOST,
        grad: torch.Tensor | None = None,
    ) -> None:
        """Builds the tables. `grad` is the gradient of the output, passed if several contenders share one tensor."""
        self.name = self.kind + ("" if hashed else "-index") + ("" if cache == 1.0 else f"@{cache:g}")
        self.workload = workload
        self.cache = cache
        self.hashed = hashed
        self.seed = seed
        self.device = device
        self._grad = workload.gradient(seed).to(device) if grad is None else grad
        self.module = self._make()

    def _cache_rows(self) -> float | dict[str, int]:
        """Converts the cache fraction to rows per table, because a fraction would be raised to fit the first batch."""
        if self.cache == 1.0:
            return self.cache
        return {f"t{index}": math.ceil(self.cache * rows) for index, rows in enumerate(self.workload.tables.sizes)}

    def _make(self) -> Any:
        pooling = Pooling.SUM if self.workload.pooled else Pooling.NONE
        pairs = zip(self.workload.tables.sizes, self.workload.dims, strict=True)
        return TableBatchedEmbedding(
            [
                TableConfig(f"t{index}", rows, dim, pooling=pooling, hashed=self.hashed)
                for index, (rows, dim) in enumerate(pairs)
            ],
            optimizer=TableOptimizer.create(*optimizer_of(self.workload.optimizer)),
            cache=self._cache_rows(),
            seed=self.seed,
            device=self.device,
            bounds_check_mode=BoundsCheckMode.FATAL,
        )

    def _batch(self, values: torch.Tensor, lengths: torch.Tensor) -> Any:
        """Builds the arguments of `forward`."""
        return values, torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))

    def inputs(self, ids: torch.Tensor) -> Any:
        return self._batch(ids.reshape(-1), self.workload.lengths)

    def forward(self, batch: Any) -> Any:
        return self.module(*batch)

    def backward(self, raw: Any) -> None:
        raw.backward(self._grad)

    def output(self, raw: Any) -> torch.Tensor:
        result: torch.Tensor = raw
        return result

    # ---- rows

    def _bags_of_one(self, ids: Sequence[torch.Tensor]) -> Any:
        """Builds bags of one id from the ids of each table; tables with fewer ids end in empty bags."""
        size = max(len(part) for part in ids)
        lengths = torch.stack([(torch.arange(size) < len(part)).long() for part in ids])
        return self._batch(torch.cat(list(ids)), lengths.view(-1))

    def _read(self, ids: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Looks up the weights of some ids of each table without a gradient; no row changes."""
        with torch.no_grad():
            found = self.output(self.forward(self._bags_of_one(ids)))
        if not self.workload.pooled:
            return list(found.split([len(part) for part in ids]))
        columns = found.split(list(self.workload.dims), dim=1)
        return [rows[: len(part)] for rows, part in zip(columns, ids, strict=True)]

    def _id_chunks(self) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Yields (first row, ids of each table) until every row of every table has been included."""
        sizes = self.workload.tables.sizes
        step = max(1, CHUNK // len(sizes))
        for begin in range(0, max(sizes), step):
            yield begin, [torch.arange(min(begin, rows), min(begin + step, rows)) for rows in sizes]

    def fill(self) -> None:
        """Makes all rows resident in the order of their ids; the cache must have a slot for every row."""
        for _, ids in self._id_chunks():
            self.forward(self._bags_of_one(ids))

    def fetch_rows(self, ids: torch.Tensor) -> None:
        """Fetches rows into the cache unchanged: runs a forward pass in training mode, but no backward pass."""
        self.forward(self.inputs(ids))

    def chunks(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yields all weights as (table, first row, `[n, D]`)."""
        for begin, ids in self._id_chunks():
            for table, rows in enumerate(self._read(ids)):
                if len(rows):
                    yield table, begin, rows

    def weights(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        parts = [ids[:0]] * self.workload.tables.count
        parts[table] = ids
        return self._read(parts)[table]

    # ---- counters

    def counters(self) -> dict[str, int]:
        """Returns the counters accumulated since the last `reset_counters`."""
        found: dict[str, int] = self.module.cache_stats()
        return found

    def reset_counters(self) -> None:
        self.module.reset_cache_stats()


class Collection(JaggedContender, Ours):
    """`EmbCacheEmbeddingCollection` or `EmbCacheEmbeddingBagCollection`, the classes that users call."""

    kind = "collection"

    def __init__(self, workload: Workload, *args: Any, **options: Any) -> None:
        """Builds the collection, with the arguments of `Ours`.

        Raises:
            NotAvailableError: torchrec is not installed.
        """
        import_torchrec()
        super().__init__(workload, *args, **options)
        self._grads = [self._grad] if workload.pooled else workload.by_feature(self._grad)

    def _make(self) -> Any:
        fields: dict[str, Any] = {"initializer_type": InitializerType.UNIFORM} if self.hashed else {}
        return make_collection(
            configs(list(zip(self.workload.tables.sizes, self.workload.dims, strict=True)), **fields),
            *optimizer_of(self.workload.optimizer),
            pooled=self.workload.pooled,
            config_prefix="EmbCache" if self.hashed else "",
            device=self.device,
            cache=self._cache_rows(),
            seed=self.seed,
            bounds_check_mode=BoundsCheckMode.FATAL,
        )
