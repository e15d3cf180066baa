"""Logging of cache metrics as scalars, to TensorBoard or another writer."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ..runtime.warn import MonitoringWarning, warn
from .prefetch import Collection, find_collections

COLLECTION_COUNTERS = ("bytes_in", "bytes_out", "plan_us", "wait_us")
"""Counters of a collection whose increase per training forward is written."""

TABLE_COUNTERS = ("rows_in", "rows_out", "new_rows")
"""Counters of a table whose increase per training forward is written."""


NORMS = {"grad_norm": 2.0, "grad_norm_inf": float("inf")}
"""Orders of the gradient norms, by scalar name; written only after `count_grad_norms()`."""


class ScalarWriter(Protocol):
    """The part of `torch.utils.tensorboard.SummaryWriter`'s interface that `CacheLog` uses."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


class CacheLog:
    """Logger of cache metrics during training, until `remove()` is called.

    If the writer raises an error, for example because the disk is full, training continues: the first error is reported
    as a warning, and later scalars are still written.

    Scalars per collection: hit rate over distinct rows, bytes swapped, microseconds of planning and waiting per
    training forward, prefetch depth reached, bytes of memory. Scalars per table: hit rate, and rows fetched, spilled
    and created per training forward. If `count_grad_norms()` was called on the collection, the scalars `grad_norm` and
    `grad_norm_inf` of its last update are written too, for the collection and for each table. Reading these norms makes
    the host wait for the device. In a sharded collection, the norms cover only the rows of this rank, because ranks may
    write at different times and must not wait for each other; `grad_norm()` covers all ranks.

    Tags are `<collection>/<scalar>` and `<collection>/<table>/<scalar>`. The collection is named as in the module, or
    `cache` if it is the module itself.

    Example:
        >>> import torch
        >>> from torchrec import KeyedJaggedTensor
        >>> import rec_sdk_torch as rst
        >>> class Writer:  # or torch.utils.tensorboard.SummaryWriter()
        ...     def add_scalar(self, tag, value, step):
        ...         if tag == "cache/t/new_rows":
        ...             print(step, tag, value)
        >>> config = rst.EmbCacheEmbeddingBagConfig(
        ...     name="t", num_embeddings=100, embedding_dim=4, feature_names=["item"]
        ... )
        >>> tables = rst.EmbCacheEmbeddingBagCollection([config], cache=10, device="cpu")
        >>> rst.apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 0.1})
        >>> log = rst.CacheLog(Writer(), tables, every=2)
        >>> for ids in ([1, 2], [2, 3]):
        ...     batch = KeyedJaggedTensor(["item"], torch.tensor(ids), lengths=torch.tensor([2]))
        ...     tables(batch).values().sum().backward()
        2 cache/t/new_rows 1.5
        >>> log.remove()
    """

    def __init__(self, writer: ScalarWriter, module: torch.nn.Module, every: int = 100) -> None:
        """Starts to log.

        Args:
            writer: object with the interface of `torch.utils.tensorboard.SummaryWriter`.
            module: a collection, or a model that contains some.
            every: number of training forwards of a collection between two writes. The count of forwards is the step of
                the scalars.

        Raises:
            ValueError: `every` is less than 1; the module has no collection.
            TypeError: the writer has no `add_scalar`.
        """
        if every < 1:
            raise ValueError(f"every is {every}, must be at least 1")
        if not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(f"writer is {writer!r}, expected one with add_scalar, as TensorBoard's SummaryWriter")
        self._logs = [
            _CollectionLog(writer, name or "cache", collection, every)
            for name, collection in find_collections(module).items()
        ]

    def remove(self) -> None:
        """Stops logging."""
        for log in self._logs:
            log.hook.remove()


class _CollectionLog:
    def __init__(self, writer: ScalarWriter, name: str, collection: Collection, every: int) -> None:
        self._writer, self._name, self._every = writer, name, every
        self._forwards = 0
        self._warned = False
        self._before: dict[str | None, dict[str, int]] = {}
        self.hook = collection.register_forward_hook(self._count_forward)

    def _count_forward(self, collection: Collection, args: object, output: object) -> None:
        if not (collection.training and torch.is_grad_enabled()):
            return
        self._forwards += 1
        if self._forwards % self._every == 0:
            self._write(collection)

    def _write(self, collection: Collection) -> None:
        self._write_counts(collection, None, COLLECTION_COUNTERS)
        for table in collection.cache_sizes:
            self._write_counts(collection, table, TABLE_COUNTERS)
        self._write_scalar(None, "depth_reached", self._before[None]["depth_reached"])
        for kind, size in collection.memory_report().items():
            self._write_scalar(None, f"{kind}_bytes", size)
        if collection.counts_grad_norms:
            for scalar, norm_type in NORMS.items():
                norms = collection.grad_norm(norm_type, local=True)
                self._write_scalar(None, scalar, norms.total)
                for name, norm in norms.tables.items():
                    self._write_scalar(name, scalar, norm)

    def _write_counts(self, collection: Collection, table: str | None, names: tuple[str, ...]) -> None:
        """Writes the hit rate and the increase of each counter per forward, since the last write or counter reset."""
        now = collection.cache_stats(table)
        before = self._before.get(table, {})
        if now["batches"] < before.get("batches", 0):
            before = {}
        self._before[table] = now
        if now["unique_rows"] > before.get("unique_rows", 0):
            missed, rows = (now[name] - before.get(name, 0) for name in ("unique_misses", "unique_rows"))
            self._write_scalar(table, "hit_rate", 1 - missed / rows)
        for name in names:
            self._write_scalar(table, name, (now[name] - before.get(name, 0)) / self._every)

    def _write_scalar(self, table: str | None, scalar: str, value: float) -> None:
        prefix = self._name if table is None else f"{self._name}/{table}"
        try:
            self._writer.add_scalar(f"{prefix}/{scalar}", value, self._forwards)
        except Exception as error:
            if not self._warned:
                self._warned = True
                warn(
                    f"CacheLog: the writer raised {type(error).__name__}: {error}. Training continues; later errors "
                    f"for {self._name!r} are not shown",
                    MonitoringWarning,
                )
