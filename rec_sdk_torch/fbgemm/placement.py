"""Placement of FBGEMM's tables: device, cache size, and tables that are resident on the device."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..operators.devices.backends import backend_for, parse_device
from ..tbe import MAX_NAME_LENGTH, Pooling, TableBatchedEmbedding, TableConfig, TableOptimizer, record_layout
from .enums import ComputeDevice, EmbeddingLocation, PoolingMode, SparseType, member

CACHE_SET_ROWS = 32
"""Number of rows in one of FBGEMM's cache sets."""

ROWS_AT_ONCE = 1 << 20
"""Number of rows that are loaded at a time while a table is made resident."""


@dataclass(frozen=True)
class EmbeddingSpec:
    """One entry of `embedding_specs`."""

    rows: int
    dim: int
    location: EmbeddingLocation

    def is_resident(self) -> bool:
        """Returns whether all rows are always in device memory."""
        return self.location in (EmbeddingLocation.DEVICE, EmbeddingLocation.HOST)

    def is_managed(self) -> bool:
        """Returns whether FBGEMM's kernels read the rows from host memory; here the device caches all that fit."""
        return self.location is EmbeddingLocation.MANAGED

    def is_cached(self) -> bool:
        """Returns whether the device caches a configured share of the rows."""
        return self.location is EmbeddingLocation.MANAGED_CACHING


def parse_specs(specs: Sequence[Sequence[Any]], enforce_hbm: bool) -> tuple[list[EmbeddingSpec], ComputeDevice]:
    """Returns the parsed `embedding_specs`, and the compute device, which must be the same in all of them.

    Raises:
        TypeError, ValueError: a spec is invalid.
    """
    if not specs:
        raise ValueError("embedding_specs is empty, at least one table is needed")
    parsed: list[EmbeddingSpec] = []
    devices: set[ComputeDevice] = set()
    for index, spec in enumerate(specs):
        where = f"embedding_specs[{index}]"
        if len(spec) != 4:
            raise ValueError(f"{where} is {spec!r}, expected (rows, dim, EmbeddingLocation, ComputeDevice)")
        location = member(EmbeddingLocation, f"the location of {where}", spec[2])
        device = member(ComputeDevice, f"the compute device of {where}", spec[3])
        if EmbeddingLocation.MTIA is location or ComputeDevice.MTIA is device:
            raise ValueError(f"{where}: MTIA is a device that rec_sdk_torch has no kernels for")
        if location is EmbeddingLocation.HOST and device is not ComputeDevice.CPU:
            raise ValueError(f"{where}: HOST is the memory of ComputeDevice.CPU; use MANAGED_CACHING or DEVICE")
        if enforce_hbm and location is not EmbeddingLocation.HOST:
            location = EmbeddingLocation.DEVICE
        parsed.append(EmbeddingSpec(spec[0], spec[1], location))
        devices.add(device)
    if len(devices) > 1:
        raise ValueError(f"embedding_specs name {sorted(d.name for d in devices)}: all tables need one compute device")
    return parsed, devices.pop()


def compute_device(kind: ComputeDevice, device: torch.device | str | int | None) -> torch.device:
    """Returns the tables' device: `device` if it is not None; otherwise CUDA means torch's accelerator of any type.

    Raises:
        RuntimeError: torch has no accelerator.
        ValueError, TypeError: `device` is invalid.
    """
    if device is not None:
        return parse_device(device)
    if kind is ComputeDevice.CPU:
        return torch.device("cpu")
    if not torch.accelerator.is_available():
        raise RuntimeError(
            "ComputeDevice.CUDA needs an accelerator, and torch has none: use ComputeDevice.CPU, or device="
        )
    return parse_device(torch.accelerator.current_device_index())


def derive_table_names(names: Sequence[str] | None, count: int) -> list[str]:
    """Returns unique, valid table names, derived from `names`; `t0`, `t1`, ... if that is None.

    Invalid characters become underscores, long names are shortened, and a repeated name gets a number.

    Raises:
        ValueError: the number of names is not the number of tables.
    """
    if names is None:
        return [f"t{index}" for index in range(count)]
    if len(names) != count:
        raise ValueError(f"table_names has {len(names)} names for {count} tables")
    result: list[str] = []
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9_]", "_", name)[: MAX_NAME_LENGTH - 8] or "t"  # leaves space for "_" and a number
        unique, number = plain, 1
        while unique in result:
            unique, number = f"{plain}_{number}", number + 1
        result.append(unique)
    return result


def table_configs(
    specs: Sequence[EmbeddingSpec],
    names: Sequence[str],
    features: Sequence[int],
    pooling: PoolingMode,
    precisions: tuple[SparseType, SparseType],
    stochastic_rounding: bool,
) -> list[TableConfig]:
    """Returns the configs of the tables. Initial weights are 0, as in FBGEMM.

    `precisions` are the data types of weights and of cached weights.
    """
    weights, cached = (precision.as_dtype() for precision in precisions)
    return [
        TableConfig(
            name,
            spec.rows,
            spec.dim,
            num_features=count,
            pooling=Pooling[pooling.name],
            hashed=False,
            weight_dtype=weights,
            cache_dtype=None if spec.is_resident() else cached,
            init_min=0.0,
            init_max=0.0,
            stochastic_rounding=stochastic_rounding,
        )
        for spec, name, count in zip(specs, names, features, strict=True)
    ]


def cache_option(
    specs: Sequence[EmbeddingSpec],
    configs: Sequence[TableConfig],
    optimizer: TableOptimizer,
    device: torch.device,
    load_factor: float,
    sets: int,
    reserved: float,
) -> dict[str, int]:
    """Returns the cache size of each table, in rows, by table name.

    DEVICE and HOST tables cache all of their rows. All MANAGED_CACHING tables cache the same share of their rows.
    MANAGED tables divide the remaining memory; FBGEMM reads their rows from host memory and needs no cache.

    Raises:
        ValueError: `load_factor` is invalid, or no memory is left for a cache.
    """
    records = [spec.rows * record_layout(config, optimizer).bytes for spec, config in zip(specs, configs, strict=True)]
    resident, managed, cached = (
        sum(size for spec, size in zip(specs, records, strict=True) if chosen(spec))
        for chosen in (EmbeddingSpec.is_resident, EmbeddingSpec.is_managed, EmbeddingSpec.is_cached)
    )
    free_bytes = backend_for(device).free_memory(device) - int(reserved) - resident if managed or cached else 0
    share = 0.0
    if cached:
        rows = sum(spec.rows for spec in specs if spec.is_cached())
        if sets > 0:  # as in FBGEMM, cache_sets takes precedence over cache_load_factor
            share = min(1.0, sets * CACHE_SET_ROWS / rows)
        else:
            if not 0 < load_factor <= 1:
                raise ValueError(f"cache_load_factor is {load_factor}, must be in (0, 1]")
            if free_bytes <= 0:
                raise ValueError(
                    f"cache_reserved_memory is {reserved} bytes, resident tables take {resident}: none are left for a "
                    "cache"
                )
            share = min(float(load_factor), free_bytes / cached)
    rest = min(1.0, max(0.0, free_bytes - share * cached) / managed) if managed else 0.0
    sizes: dict[str, int] = {}
    for spec, config in zip(specs, configs, strict=True):
        part = share if spec.is_cached() else rest
        sizes[config.name] = spec.rows if spec.is_resident() else max(1, round(part * spec.rows))
    return sizes


def make_resident(tables: TableBatchedEmbedding, names: Sequence[str]) -> None:
    """Loads all rows of the named tables into device memory in order, so that row i is in cache slot i of its table.

    The rows stay there, because the cache has space for all of them; `TableView.in_place` returns views of them.
    """
    resident = set(names)
    first = 0
    was_training = tables.training
    tables.train()
    try:
        for table in tables.tables:
            if table.name in resident:
                for begin in range(0, table.num_embeddings, ROWS_AT_ONCE):
                    _load_rows(tables, first, begin, min(begin + ROWS_AT_ONCE, table.num_embeddings))
            first += table.num_features
    finally:
        tables.train(was_training)
    tables.reset_cache_stats()


def _load_rows(tables: TableBatchedEmbedding, feature: int, begin: int, end: int) -> None:
    """Loads rows `begin` to `end` of a feature's table, with a training lookup that has no backward pass."""
    lengths = torch.zeros(tables.num_features + 1, dtype=torch.int64, device="cpu")
    lengths[feature + 1 :] = end - begin
    with torch.inference_mode(False), torch.enable_grad():
        tables(torch.arange(begin, end, device="cpu"), lengths)
