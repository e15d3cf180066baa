"""A table of a group: its record, its part of the engine, and what its rows are at first."""

from __future__ import annotations

from collections.abc import Sequence
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
    """A table of a group.

    Attributes:
        config: the table.
        features: which features of the embedding look it up.
        slots: its rows in the device cache.
        optimizer: what updates it; None while none is known (the group can then only be read).
    """

    config: TableConfig
    features: tuple[int, ...]
    slots: int
    optimizer: TableOptimizer | None

    @property
    def cache_slots(self) -> int:
        """With that of the default row, which is behind the others."""
        return self.slots + int(self.config.lifecycle is not None and self.config.lifecycle.admits)


class ChangeObserver(Protocol):
    """A save of one moment of a table: it takes rows as they are before they change."""

    def before_update(self, slots: np.ndarray) -> None: ...

    def before_change(self, ids: Int64Array) -> None: ...

    def before_all_change(self) -> None: ...

    def before_replacement(self) -> None: ...


def record_layout(config: TableConfig, optimizer: TableOptimizer | None) -> RecordLayout:
    """The record of a row of `config` in the cache, with the states of `optimizer`."""
    states = optimizer.spec.states if optimizer else ()
    dim = config.embedding_dim
    elements = tuple(state.elements(dim) for state in states)
    return RecordLayout(dim, config.cached_dtype, elements, optimizer.state_dtypes if optimizer else ())


def partition_into_groups(
    configs: Sequence[TableConfig], optimizers: Sequence[TableOptimizer | None]
) -> list[list[int]]:
    """Indices of the tables that may share a group: of one record, one update and one way of rounding."""
    found: dict[object, list[int]] = {}
    for index, (config, optimizer) in enumerate(zip(configs, optimizers, strict=True)):
        kernel = (optimizer.spec.kernel, optimizer.accumulate_step) if optimizer else None
        kind = record_layout(config, optimizer), kernel, config.rounds_stochastically
        found.setdefault(kind, []).append(index)
    return list(found.values())


def stored_bytes(config: TableConfig, optimizer: TableOptimizer | None) -> int:
    """Bytes of such a record in the host's table."""
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
    """The first values of the state blocks of each table's rows, by the options that its optimizer has now."""
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
    given = zip(members, state_inits, strict=True)
    return _engine.Engine(
        [_table_spec(member, state_init, seed, bounds_check, stores) for member, state_init in given],
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
    """Fills the rows of a cache that ids without a row read."""
    end = 0
    for member in members:
        end += member.cache_slots
        if member.config.lifecycle is not None and member.cache_slots > member.slots:
            weights[end - 1].fill_(member.config.lifecycle.default_value)


def draw_initial_weights(config: TableConfig, rows: int) -> torch.Tensor:
    """Initial weights from the table's `init_fn`, `[rows, D]`."""
    assert config.init_fn is not None
    weight = torch.empty((rows, config.embedding_dim), dtype=config.weight_dtype, device="cpu")
    with torch.no_grad():
        result = config.init_fn(weight)
    return result if isinstance(result, torch.Tensor) else weight
