"""All options of an embedding except for its tables, in one object that copies, shards and collections pass on."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar, overload

import torch

from .._engine import cache_policies
from ..operators.devices.backends import backend_for, parse_device
from ..runtime.eager import check_real
from .config.cache_size import BatchHint, CacheOption, check_cache_option, check_host_memory, warn_of_one_row
from .config.table import BoundsCheckMode, TableConfig

CHECKS = ("off", "warn", "raise")
UPDATES = ("backward", "step")

Device: TypeAlias = torch.device | str | int | None
Folder: TypeAlias = str | os.PathLike[str] | None


class Scaler(Protocol):
    """The methods of `torch.amp.GradScaler` that tables use."""

    def get_scale(self) -> float: ...

    def is_enabled(self) -> bool: ...


Input = TypeVar("Input")
Stored = TypeVar("Stored")


class _ConvertingField(Generic[Input, Stored]):
    """A dataclass field whose value is checked and converted to one type when it is set."""

    def __init__(self, parse: Callable[[Input], Stored], default: Input) -> None:
        self._parse = parse
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Input: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Stored: ...
    def __get__(self, instance: object | None, owner: type) -> Input | Stored:
        if instance is None:
            return self._default
        kept: Stored = instance.__dict__[self._name]
        return kept

    def __set__(self, instance: object, value: Input) -> None:
        instance.__dict__[self._name] = self._parse(value)


def _copy_cache(cache: CacheOption) -> CacheOption:
    """Copies a dict, since the caller may change it later."""
    return dict(cache) if isinstance(cache, Mapping) else cache


def _one_of(option: str, allowed: Sequence[str]) -> Callable[[str], str]:
    """Returns a function that returns an allowed value of an option, and raises ValueError for any other."""

    def parse(value: str) -> str:
        if value not in allowed:
            raise ValueError(f"{option} is {value!r}, allowed are {list(allowed)}")
        return value

    return parse


def _parse_host_store(folder: Folder) -> str | None:
    if folder is None:
        return None
    path = os.fspath(folder) if isinstance(folder, str | os.PathLike) else folder
    if not isinstance(path, str):
        raise TypeError(f"host_store is {path!r}, expected the path of a folder")
    if not path or "\0" in path:
        raise ValueError(f"host_store is {path!r}, which is no path of a folder")
    return path


def _check_evict_step_interval(steps: int | None) -> int | None:
    if steps is not None and steps < 1:
        raise ValueError(f"evict_step_interval is {steps}, must be 1 or more, or None")
    return steps


def _check_grad_scaler(scaler: Scaler | None) -> Scaler | None:
    if scaler is not None and not all(callable(getattr(scaler, n, None)) for n in ("get_scale", "is_enabled")):
        raise TypeError(f"scaler is {scaler!r}, expected a torch.amp.GradScaler or None")
    return scaler


def _parse_seed(seed: int | None) -> int:
    """Returns the seed as a number below 2^64; for None, draws a seed from torch's generator."""
    if seed is None:
        drawn = torch.empty((), dtype=torch.int64, device="cpu").random_()
        check_real(drawn)
        return int(drawn) & (2**64 - 1)
    try:
        return operator.index(seed) & (2**64 - 1)
    except TypeError:
        raise TypeError(f"seed is {seed!r}, expected an int or None") from None


@dataclass(frozen=True, kw_only=True)
class EmbeddingOptions:
    """All options of an embedding except for its tables: constructor arguments, and options that are set later.

    Attributes:
        cache: size of the device cache: rows per table (int), a fraction of `num_embeddings` (float), bytes of all
            tables (`"2GiB"`), one of these by table name (dict), or None (derived).
        batch_hint: the batches that a derived cache must hold.
        device: the device of the cache. None: torch's default device, which is the host unless `torch.device` is used
            as a context or `torch.set_default_device` was called. An int is an index of the machine's accelerator. On
            `meta`, tables have only shapes and cannot be looked up before they are sharded or moved with `to_empty`.
        bounds_check_mode: the reaction to an id outside an index table.
        check_finite: the reaction to a NaN or infinite gradient: none (`off`), a warning (`warn`), or a
            FloatingPointError in the backward pass before any row changes (`raise`).
        cache_policy: the policy that chooses victims when the cache is full, see docs/cache.md. It does not change
            results.
        update: when rows are updated: in the `backward` pass, or by `step()` of the tables' optimizer, with the
            gradients of all backward passes since the last update.
        host_store: a folder whose memory-mapped files hold the rows, for tables that are larger than host memory; None:
            the rows are in host memory. The folder belongs to the tables: nothing else may use it, and its files are
            removed with them. Each copy of the embedding, and each rank of a sharded collection, uses a subfolder.
        evict_step_interval: number of training steps between evictions of ids, for all tables with eviction rules;
            None: the number in each table's configuration.
        grad_scaler: the `torch.amp.GradScaler` that scales the losses; None: there is none.
        frozen: names of the tables that training reads but does not change.
        grad_norms: whether updates in the backward pass record the norms of their gradients.
        seed: the seed of the initial weights: the same seed, table name and id give the same weights. None: drawn from
            torch's generator, so that two embeddings have different weights.

    Raises:
        ValueError, TypeError: an option is invalid, whatever the tables are; the message names the option.
        ImportError: software that the device requires is missing.
    """

    cache: _ConvertingField[CacheOption, CacheOption] = _ConvertingField(_copy_cache, None)
    batch_hint: _ConvertingField[BatchHint | None, BatchHint] = _ConvertingField(lambda hint: hint or BatchHint(), None)
    device: _ConvertingField[Device, torch.device] = _ConvertingField(parse_device, None)
    bounds_check_mode: _ConvertingField[BoundsCheckMode | str, BoundsCheckMode] = _ConvertingField(
        BoundsCheckMode.parse, BoundsCheckMode.WARNING
    )
    check_finite: _ConvertingField[str, str] = _ConvertingField(_one_of("check_finite", CHECKS), "off")
    cache_policy: _ConvertingField[str, str] = _ConvertingField(_one_of("cache_policy", cache_policies()), "lrfu")
    update: _ConvertingField[str, str] = _ConvertingField(_one_of("update", UPDATES), "backward")
    host_store: _ConvertingField[Folder, str | None] = _ConvertingField(_parse_host_store, None)
    evict_step_interval: _ConvertingField[int | None, int | None] = _ConvertingField(_check_evict_step_interval, None)
    grad_scaler: _ConvertingField[Scaler | None, Scaler | None] = _ConvertingField(_check_grad_scaler, None)
    frozen: _ConvertingField[Collection[str], frozenset[str]] = _ConvertingField(frozenset, frozenset())
    grad_norms: _ConvertingField[bool, bool] = _ConvertingField(bool, False)
    # The last field: no seed may be drawn if another option is invalid.
    seed: _ConvertingField[int | None, int] = _ConvertingField(_parse_seed, None)

    def __post_init__(self) -> None:
        if self.grad_scaler is not None and self.updates_at_step:
            raise ValueError(
                "with update='step' a GradScaler unscales the tables' gradients like all others: do not call "
                "set_grad_scaler(), and pass scaler.step(...) an optimizer that includes the tables' optimizer"
            )

        if self.grad_norms and self.updates_at_step:
            raise ValueError("with update='step' no norms need to be recorded: grad_norm() reads the pending gradients")

    @property
    def updates_at_step(self) -> bool:
        """Whether rows are updated by `step()` of the tables' optimizer (`update="step"`)."""
        return self.update == "step"

    def check(self, tables: Sequence[TableConfig]) -> None:
        """Checks whether the options fit the tables, as far as this is possible before rows are allocated.

        Raises:
            ValueError, TypeError: an option does not fit the tables.
            NotImplementedError: tables are not supported on the device.
            MemoryError: the host has too little memory for the index tables.
        """
        if self.device.type != "meta":
            backend_for(self.device)
            if self.host_store is None:
                check_host_memory(tables, [table.weight_bytes for table in tables])
        check_cache_option(tables, self.cache)
        warn_of_one_row(tables, self.cache)
        self.batch_hint.rows(tables, batches=1)
