"""The options of an embedding beside its tables, in one object that copies, shards and collections hand on."""

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
    """The part of `torch.amp.GradScaler` that tables need."""

    def get_scale(self) -> float: ...

    def is_enabled(self) -> bool: ...


Input = TypeVar("Input")
Stored = TypeVar("Stored")


class _ParsedField(Generic[Input, Stored]):
    """A field of a dataclass that is checked, and kept in one form, when it is set."""

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
    """A copy of a dict, which its owner may change."""
    return dict(cache) if isinstance(cache, Mapping) else cache


def _one_of(option: str, allowed: Sequence[str]) -> Callable[[str], str]:
    """Returns the check of an option that has one of these values."""

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
    """The seed given, or one of torch's generator, as the weights of torch's modules: each embedding gets another."""
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
    """The options of an embedding beside its tables: what it was made with, and what was set since.

    Attributes:
        cache: size of the device cache: rows per table (int), a fraction of `num_embeddings` (float), bytes of all
            tables (`"2GiB"`), one of these by table name (dict), or None (derived).
        batch_hint: the batches a derived cache must hold.
        device: where the cache lives. None: torch's default device, the host unless `torch.device` as a context or
            `torch.set_default_device` says otherwise. An int is an index of the machine's accelerator. On `meta` tables
            are shapes and cannot forward, until they are sharded or brought to a device with `to_empty`.
        bounds_check_mode: what an id outside an index table does.
        check_finite: what a NaN or infinite gradient does: nothing (`off`), a warning (`warn`), or a
            FloatingPointError in the backward pass before any row changes (`raise`).
        cache_policy: which rows leave a full cache: a policy of docs/cache.md. Results are the same.
        update: when rows are updated: in the `backward` pass, or by `step()` of the tables' optimizer, with the
            gradients of all backward passes since the last one.
        host_store: a folder for the rows, in files that are mapped into memory, where the host's memory does not
            hold them; None keeps them in memory. Nothing else may use the folder meanwhile; its files are removed
            with the tables. A copy has a folder inside of it, and so has each rank of a sharded collection.
        evict_step_interval: training steps between evictions of ids, of all tables that evict some; None: what their
            configs say.
        grad_scaler: what scales the losses; None: nothing does.
        frozen: tables, by name, that training only reads.
        grad_norms: whether updates in the backward pass count the norms of their gradients.
        seed: of the initial weights, which are the same for the same seed, name of a table and id. None: drawn from
            torch's generator, so that no two embeddings start alike.

    Raises:
        ValueError, TypeError: an option that no tables could have; the message names it.
        ImportError: the software of the device is missing.
    """

    cache: _ParsedField[CacheOption, CacheOption] = _ParsedField(_copy_cache, None)
    batch_hint: _ParsedField[BatchHint | None, BatchHint] = _ParsedField(lambda hint: hint or BatchHint(), None)
    device: _ParsedField[Device, torch.device] = _ParsedField(parse_device, None)
    bounds_check_mode: _ParsedField[BoundsCheckMode | str, BoundsCheckMode] = _ParsedField(
        BoundsCheckMode.parse, BoundsCheckMode.WARNING
    )
    check_finite: _ParsedField[str, str] = _ParsedField(_one_of("check_finite", CHECKS), "off")
    cache_policy: _ParsedField[str, str] = _ParsedField(_one_of("cache_policy", cache_policies()), "lrfu")
    update: _ParsedField[str, str] = _ParsedField(_one_of("update", UPDATES), "backward")
    host_store: _ParsedField[Folder, str | None] = _ParsedField(_parse_host_store, None)
    evict_step_interval: _ParsedField[int | None, int | None] = _ParsedField(_check_evict_step_interval, None)
    grad_scaler: _ParsedField[Scaler | None, Scaler | None] = _ParsedField(_check_grad_scaler, None)
    frozen: _ParsedField[Collection[str], frozenset[str]] = _ParsedField(frozenset, frozenset())
    grad_norms: _ParsedField[bool, bool] = _ParsedField(bool, False)
    seed: _ParsedField[int | None, int] = _ParsedField(_parse_seed, None)  # the last: what cannot be draws nothing

    def __post_init__(self) -> None:
        if self.grad_scaler is not None and self.updates_at_step:
            raise ValueError(
                "with update='step' a GradScaler unscales the tables' gradients as it does others: do not tell the "
                "tables of it, and give scaler.step(...) an optimizer that has the tables'"
            )

        if self.grad_norms and self.updates_at_step:
            raise ValueError(
                "with update='step' there is nothing to count: grad_norm() gives the norms of the gradients that wait"
            )

    @property
    def updates_at_step(self) -> bool:
        """Whether gradients wait for `step()` of the tables' optimizer."""
        return self.update == "step"

    def check(self, tables: Sequence[TableConfig]) -> None:
        """Checks that these tables can have the options, as far as that is known before rows are laid out.

        Raises:
            ValueError, TypeError: they cannot.
            NotImplementedError: tables cannot live on the device.
            MemoryError: index tables that the host cannot hold.
        """
        if self.device.type != "meta":
            backend_for(self.device)
            if self.host_store is None:
                check_host_memory(tables, [table.weight_bytes for table in tables])
        check_cache_option(tables, self.cache)
        warn_of_one_row(tables, self.cache)
        self.batch_hint.rows(tables, batches=1)
