"""The tables of a group: record layouts, grouping, construction of the engine and initial values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from ... import _engine
from ...operators.record import WEIGHT_DTYPES, RecordLayout, dtype_codes
from ..config.optimizer import TableOptimizer
from ..config.table import ENGINE, BoundsCheckMode, TableConfig
from .batch import Int64Array
from .store_folder import StoreFolder


@dataclass(frozen=True)
class Member:
    """One table of a group.

    Attributes:
        config: the table's config.
        features: the features of the embedding that look up the table.
        slots: rows of the table in the device cache.
        optimizer: the optimizer of the table; None: it has none yet, so that the group can only be read.
    """

    config: TableConfig
    features: tuple[int, ...]
    slots: int
    optimizer: TableOptimizer | None

    @property
    def cache_slots(self) -> int:
        """Number of slots including the default row, which is the last slot of a table with an admission rule."""
        return self.slots + int(self.config.lifecycle is not None and self.config.lifecycle.admits)


class ChangeObserver(Protocol):
    """Receiver of notifications before rows of a table change: a running save, which then copies the rows."""

    def before_update(self, slots: np.ndarray) -> None: ...

    def before_change(self, ids: Int64Array) -> None: ...

    def before_all_change(self) -> None: ...

    def before_replacement(self) -> None: ...


def record_layout(config: TableConfig, optimizer: TableOptimizer | None) -> RecordLayout:
    """Returns the layout of a row's record in the cache: weight and optimizer states."""
    states = optimizer.spec.states if optimizer else ()
    dim = config.embedding_dim
    elements = tuple(state.elements(dim) for state in states)
    return RecordLayout(dim, config.cached_dtype, elements, optimizer.state_dtypes if optimizer else ())


def partition_into_groups(
    configs: Sequence[TableConfig], optimizers: Sequence[TableOptimizer | None]
) -> list[list[int]]:
    """Partitions tables into groups with the same record layout, update kernel and rounding mode.

    Returns:
        The indices of the tables of each group.
    """
    groups: dict[object, list[int]] = {}
    for index, (config, optimizer) in enumerate(zip(configs, optimizers, strict=True)):
        kernel = (optimizer.spec.kernel, optimizer.accumulate_step) if optimizer else None
        kind = record_layout(config, optimizer), kernel, config.rounds_stochastically
        groups.setdefault(kind, []).append(index)
    return list(groups.values())


def stored_bytes(config: TableConfig, optimizer: TableOptimizer | None) -> int:
    """Returns the bytes of a row's record in the host store."""
    return replace(record_layout(config, optimizer), weight_dtype=config.weight_dtype).bytes


def _table_spec(
    member: Member, state_init: list[float], seed: int, bounds_check: BoundsCheckMode, stores: StoreFolder | None
) -> _engine.TableSpec:
    config = member.config
    low, high = config.init_range
    initializer = _engine.Initializer(config.initializer_kind, low, high, config.init_mean, config.init_stddev)
    optimizer, lifecycle = member.optimizer, config.lifecycle
    return _engine.TableSpec(
        **config.marked(ENGINE),
        slots=member.slots,
        initializer=initializer,
        seed=seed,
        state_init=state_init,
        bounds_check=bounds_check.value,
        columns=[*(["version"] if config.track_changes else []), *(lifecycle.columns() if lifecycle else [])],
        lifecycle=lifecycle.to_engine(stored_bytes(config, optimizer)) if lifecycle else None,
        store_path="" if stores is None else stores.new_path(config.name),
        stored_dtype=WEIGHT_DTYPES.index(config.weight_dtype),
    )


def state_inits(members: Sequence[Member]) -> list[list[float]]:
    """Returns, for each table, the initial values of its optimizer states under the optimizer's current options."""
    optimizers = [member.optimizer for member in members]
    return [each.spec.state_init(each.options) if each is not None else [] for each in optimizers]


def make_engine(
    members: Sequence[Member],
    layout: RecordLayout,
    columns: Sequence[int],
    means: Sequence[bool],
    seed: int,
    bounds_check: BoundsCheckMode,
    cache_policy: str,
    serial: int,
    stores: StoreFolder | None,
    row_ids: bool,
    state_inits: Sequence[list[float]],
    origins: bool,
) -> _engine.Engine:
    """Creates an engine for these tables, without rows. `origins`: whether plans have the array `origins`."""
    pairs = zip(members, state_inits, strict=True)
    return _engine.Engine(
        [_table_spec(member, state_init, seed, bounds_check, stores) for member, state_init in pairs],
        layout.dim,
        WEIGHT_DTYPES.index(layout.weight_dtype),
        list(layout.state_elements),
        [index for index, member in enumerate(members) for _ in member.features],
        list(columns),
        list(means) if columns else [],
        policy=cache_policy,
        serial=serial,
        row_ids=row_ids,
        state_dtypes=dtype_codes(layout.state_dtypes),
        origins=origins,
    )


def fill_default_rows(members: Sequence[Member], weights: torch.Tensor) -> None:
    """Fills the default row of each table in the cache, which is read by lookups of ids without a row."""
    end = 0
    for member in members:
        end += member.cache_slots
        if member.config.lifecycle is not None and member.cache_slots > member.slots:
            weights[end - 1].fill_(member.config.lifecycle.default_value)


def draw_initial_weights(config: TableConfig, rows: int) -> torch.Tensor:
    """Returns initial weights from the table's `init_fn`, `[rows, D]`."""
    assert config.init_fn is not None
    weight = torch.empty((rows, config.embedding_dim), dtype=config.weight_dtype, device="cpu")
    with torch.no_grad():
        result = config.init_fn(weight)
    return result if isinstance(result, torch.Tensor) else weight


class InitFns:
    """The `init_fn`s of hash tables, which draw the initial weights of new rows."""

    def __init__(self, configs: Mapping[int, TableConfig], layout: RecordLayout) -> None:
        self._configs = configs
        self._layout = layout

    @classmethod
    def of(cls, members: Sequence[Member], layout: RecordLayout) -> InitFns | None:
        """Returns the `init_fn`s of a group's hash tables; None if no hash table has an `init_fn`."""
        hashed = ((index, member.config) for index, member in enumerate(members) if member.config.hashed)
        configs = {index: config for index, config in hashed if config.init_fn is not None}
        return cls(configs, layout) if configs else None

    def __call__(self, new: np.ndarray, tables: np.ndarray, records: torch.Tensor) -> None:
        """Fills the weights of the new rows, `records[new]`; `tables`: the table of each new row."""
        for index, config in self._configs.items() if len(new) else ():
            rows = torch.from_numpy(new[tables == index]).long()
            weights = self._layout.weight(records)
            weights[rows] = draw_initial_weights(config, len(rows)).to(weights.dtype)
