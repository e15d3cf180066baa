"""The contenders of a step benchmark: ours here, by the package's public names alone; the rivals in `rivals.py`."""

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
    """Tables with an optimizer, ready to train on a workload's batches."""

    name: str

    def inputs(self, ids: torch.Tensor) -> Any:
        """Makes what a data loader would hand to `forward`, from int64 `[tables, lookups per table]`; not timed."""
        return ids

    @abstractmethod
    def forward(self, batch: Any) -> Any:
        """Looks up what `inputs` made; returns the output as it comes."""

    @abstractmethod
    def backward(self, raw: Any) -> None:
        """Backward of an output of `forward`, with the workload's gradient, and update."""

    def step(self, ids: torch.Tensor) -> Any:
        """Both; returns the output."""
        raw = self.forward(self.inputs(ids))
        self.backward(raw)
        return raw

    @abstractmethod
    def output(self, raw: Any) -> torch.Tensor:
        """The result of `forward` in one layout: `[N, D]` feature after feature, or `[B, dims of all tables]`."""

    @abstractmethod
    def weights(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        """Current weights of `ids` `[n]`, float32 `[n, D]`."""


def optimizer_of(name: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Class and keywords of one of OPTIMIZERS.

    Raises:
        NotAvailableError: its class cannot be imported.
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


class OfJagged(Contender):
    """Takes a KeyedJaggedTensor, as collections do.

    A sequence gives a tensor per feature and gets a gradient for each, as from a model; a pooled output is one
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
    """`TableBatchedEmbedding`: ids and offsets in, one output and one gradient for all features."""

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
        """`grad` is the gradient of the output when others share it."""
        self.name = self.kind + ("" if hashed else "-index") + ("" if cache == 1.0 else f"@{cache:g}")
        self.workload = workload
        self.cache = cache
        self.hashed = hashed
        self.seed = seed
        self.device = device
        self._grad = workload.gradient(seed).to(device) if grad is None else grad
        self.module = self._make()

    def _cache_rows(self) -> float | dict[str, int]:
        """Returns the share as exact rows of each table: a share is raised to what the first batch can need."""
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
        """A batch as `forward` takes it."""
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

    def _one_a_bag(self, ids: Sequence[torch.Tensor]) -> Any:
        """The ids of each table as bags of one; a table with fewer than others ends in empty bags."""
        size = max(len(part) for part in ids)
        lengths = torch.stack([(torch.arange(size) < len(part)).long() for part in ids])
        return self._batch(torch.cat(list(ids)), lengths.view(-1))

    def _read(self, ids: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Weights of some ids of each table, as a lookup without gradient sees them, which changes no row."""
        with torch.no_grad():
            found = self.output(self.forward(self._one_a_bag(ids)))
        if not self.workload.pooled:
            return list(found.split([len(part) for part in ids]))
        columns = found.split(list(self.workload.dims), dim=1)
        return [rows[: len(part)] for rows, part in zip(columns, ids, strict=True)]

    def _id_chunks(self) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """(first row, ids of each table), until every row of every table was there."""
        sizes = self.workload.tables.sizes
        step = max(1, CHUNK // len(sizes))
        for begin in range(0, max(sizes), step):
            yield begin, [torch.arange(min(begin, rows), min(begin + step, rows)) for rows in sizes]

    def fill(self) -> None:
        """Makes every row resident, in order of its id; the cache must hold whole tables."""
        for _, ids in self._id_chunks():
            self.forward(self._one_a_bag(ids))

    def look(self, ids: torch.Tensor) -> None:
        """Brings rows into the cache and changes none: a training forward without its backward."""
        self.forward(self.inputs(ids))

    def chunks(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """All weights as (table, first row, `[n, D]`)."""
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
        """The counts since `reset_counters`."""
        found: dict[str, int] = self.module.cache_stats()
        return found

    def reset_counters(self) -> None:
        self.module.reset_cache_stats()


class Collection(OfJagged, Ours):
    """`EmbCacheEmbeddingCollection` or `EmbCacheEmbeddingBagCollection`: what users call."""

    kind = "collection"

    def __init__(self, workload: Workload, *args: Any, **options: Any) -> None:
        """As `Ours`.

        Raises:
            NotAvailableError: there is no torchrec.
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
