"""Checks that all ranks configured a sharded collection identically; the error names the ranks that differ."""

from __future__ import annotations

import dataclasses
import zlib
from array import array
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, TypeAlias

from torchrec.distributed.comm_ops import get_gradient_division

from ..formulas import class_name
from ..modules.collection import CachedCollection
from ..modules.configs import feature_names
from ..tbe import TableBatchedEmbedding, TableConfig, TableLifecycle, TableOptimizer
from .placement import Placement

RankSettings: TypeAlias = dict[str, dict[str, str]]
"""Settings of a rank as text, by table name ("" for the collection) and setting name."""

SHOWN = 5
"""Maximum number of differences in a message, and of ranks listed for one value."""


def collection_settings(
    collection: CachedCollection, placements: Sequence[Placement], path: str | None
) -> RankSettings:
    """Returns the settings of a collection that must be equal on all ranks, because they shape rows and messages.

    Args:
        collection: the collection that is being sharded.
        placements: placement of each table.
        path: module path of the collection in its model; None if unknown.
    """
    tables = collection.embedding.tables
    common = {
        "path": path,
        "class": type(collection).__name__,
        "tables": [table.name for table in tables],
        "is_weighted": collection.is_weighted(),
    }
    settings = {"": _as_text(common)}
    for config, table, placement in zip(collection.configs, tables, placements, strict=True):
        own = {"features": feature_names(config), "sharding": placement.name}
        settings[table.name] = _as_text(own | _table_settings(table))
    return settings


def _table_settings(table: TableConfig) -> dict[str, Any]:
    fields = _field_values(table)
    fill = fields["init_fn"]  # functions of two processes can only be compared by name
    fields["init_fn"] = fill and getattr(fill, "__qualname__", type(fill).__name__)
    return fields | _field_values(fields.pop("lifecycle") or TableLifecycle())


def _field_values(options: Any) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}


def _as_text(settings: Mapping[str, Any]) -> dict[str, str]:
    return {name: repr(value.value if isinstance(value, Enum) else value) for name, value in settings.items()}


class TrainingSettings:
    """Settings that may change during training but must be equal on all ranks, such as optimizer options and steps."""

    def __init__(self, embedding: TableBatchedEmbedding, drawn: Mapping[str, str], draws: bool) -> None:
        """Creates the settings of this rank's tables.

        Args:
            embedding: the rows of this rank.
            drawn: checksums of the initial rows that every rank draws by itself (replicated tables), by description.
            draws: whether the first use of the tables draws rows of replicated tables.
        """
        self._embedding, self._drawn, self._draws = embedding, drawn, draws
        self._options: list[tuple[TableOptimizer, dict[str, Any]]] = []
        self._version: tuple[object, ...] | None = None
        self._checksum = 0

    def checksum(self, training: bool) -> int:
        """Returns a 32-bit checksum of the settings; ranks with the same settings get the same checksum.

        Args:
            training: whether the rank trains. If False, the checksum covers only changes that users made to the pending
                gradients of replicated tables.
        """
        layout, scaler, checksum = self._embedding.layout, self._embedding.guard.scaler, 0
        if training:
            if self._draws:
                _ = layout.groups  # builds the tables and draws their rows
            scales = scaler is not None and scaler.is_enabled()
            version = layout.options, scales, get_gradient_division(), *self._drawn.items()
            changed = version != self._version
            for optimizer, known in self._options:
                changed = changed or optimizer.options != known
            if changed:
                self._update_checksum(version)
            steps = array("q", [-1 if optimizer is None else optimizer.step for optimizer in layout.optimizers])
            checksum = zlib.crc32(steps, self._checksum)
        if layout.pending_gradients.applied:
            checksum = zlib.crc32(repr(sorted(layout.pending_gradients.applied.items())).encode(), checksum)
        if training and (any(layout.windows.values()) or layout.pending_gradients.backward_passes):
            checksum = zlib.crc32(repr(self._backward_counts()).encode(), checksum)
        return checksum

    def _backward_counts(self) -> dict[str, int]:
        """Returns how many backward passes accumulation buffers and pending gradients contain, by description."""
        layout = self._embedding.layout
        open_windows = sorted((length, count) for length, count in layout.windows.items() if count)
        settings = {f"backward passes in the accumulation buffer of {length}": count for length, count in open_windows}
        if layout.pending_gradients.backward_passes:
            settings["backward passes pending for step()"] = layout.pending_gradients.backward_passes
        return settings

    def _update_checksum(self, version: tuple[object, ...]) -> None:
        optimizers = self._embedding.optimizers
        distinct = {id(optimizer): optimizer for optimizer in optimizers if optimizer is not None}.values()
        self._options = [(optimizer, dict(optimizer.options)) for optimizer in distinct]
        # Only immutable options can be compared with former ones. Others, such as tensors, are read in every batch.
        constant = None not in optimizers and all(each.has_constant_options() for each, _ in self._options)
        self._version = version if constant else None
        self._checksum = zlib.crc32(
            repr((self._collection_settings(), [_optimizer_settings(optimizer) for optimizer in optimizers])).encode()
        )

    def _collection_settings(self) -> dict[str, Any]:
        guard, options = self._embedding.guard, self._embedding.options
        return {
            "evict_step_interval": options.evict_step_interval,
            "frozen": sorted(options.frozen),
            "grad_norms": options.grad_norms,
            "update": options.update,
            "check_finite='raise'": guard.check_finite == "raise",
            "grad scaler": guard.scaler is not None and guard.scaler.is_enabled(),
            "gradient division": get_gradient_division(),
            **self._drawn,
        }

    def as_text(self) -> RankSettings:
        """Returns the settings as text, so that an error message can name the ones that differ."""
        settings = {"": _as_text(self._collection_settings() | self._backward_counts())}
        for table, optimizer in zip(self._embedding.tables, self._embedding.optimizers, strict=True):
            step = {} if optimizer is None else {"step": optimizer.step}
            settings[table.name] = _as_text(_optimizer_settings(optimizer) | step)
        for name, changes in self._embedding.layout.pending_gradients.applied_checksums().items():
            settings[name] |= changes
        return settings


def _optimizer_settings(optimizer: TableOptimizer | None) -> dict[str, Any]:
    if optimizer is None:
        return {"optimizer": None}
    options = optimizer.plain_options()
    known = {name: options[name] for name in optimizer.spec.options if name in options}
    return {
        "optimizer": class_name(optimizer.cls),
        **known,
        "max_gradient": optimizer.max_gradient,
        "accumulate_step": optimizer.accumulate_step,
        "state_dtypes": optimizer.state_dtypes,
    }


# ---- differences between ranks


def differences(of_ranks: Sequence[RankSettings]) -> list[str]:
    """Returns descriptions of the settings that differ between ranks.

    Settings of tables are only compared if the collection's settings agree. At most `SHOWN` differences are described;
    the number of further ones follows.
    """
    result: list[str] = []
    for part in dict.fromkeys(part for settings in of_ranks for part in settings):
        own = [settings.get(part, {}) for settings in of_ranks]
        for setting in dict.fromkeys(setting for settings in own for setting in settings):
            values = [settings.get(setting, "None") for settings in own]
            if len(set(values)) > 1:
                table = f"table {part!r}: " if part else ""
                result.append(f"{table}{setting} is {describe_by_rank(values, '{value} on {ranks}')}")
        if result and not part:
            break
    more = [f"and {len(result) - SHOWN} more"] if len(result) > SHOWN else []
    return result[:SHOWN] + more


def describe_by_rank(values: Sequence[str], form: str) -> str:
    """Returns text that lists each value with the ranks that have it.

    Args:
        values: the value of each rank.
        form: format string with `{value}` and `{ranks}`.
    """
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(form.format(value=value, ranks=_rank_list(own)) for value, own in ranks.items())


def _rank_list(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    *shown, last = map(str, ranks[:SHOWN])
    if len(ranks) > SHOWN:
        return f"ranks {', '.join([*shown, last])} and {len(ranks) - SHOWN} others"
    return f"ranks {', '.join(shown)} and {last}"
