"""Builds the manifest of a save before its files are written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from ...tbe import TableOptimizer
from ..format.manifest import DELTA, FULL, Manifest, RowFormats, SavedOptimizer, SavedTable, row_formats
from ..format.tensors import DTYPE_NAMES
from ..owners import TableOwner


@dataclass(frozen=True)
class SaveIdentity:
    """The id, chain position and folder of a new save; they are the same on all ranks.

    Attributes:
        id: id of the save.
        base, previous, sequence: position in a chain, as in the manifest.
        folder: temporary folder to which the save is written.
        folders: parent folders of the other saves in its chain.
    """

    id: str
    base: str
    previous: str | None
    sequence: int
    folder: str
    folders: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return FULL if self.previous is None else DELTA


def table_keys(owners: Sequence[TableOwner]) -> dict[tuple[int, str], str]:
    """Returns the key of each table in a save, by the position of its owner and the table's name."""
    keys: dict[tuple[int, str], str] = {}
    counts: dict[str, int] = {}
    for position, owner in enumerate(owners):
        for name in owner.configs:
            number = counts.get(name, 0)
            counts[name] = number + 1
            keys[position, name] = f"{name}.{number}" if number else name
    return keys


def draft_manifest(owners: Sequence[TableOwner], keys: dict[tuple[int, str], str], identity: SaveIdentity) -> Manifest:
    """Returns the manifest for a save of the current tables, with files and row counts left empty."""
    optimizers: dict[int, tuple[int, TableOptimizer]] = {}
    tables = []
    for position, owner in enumerate(owners):
        for name in owner.configs:
            optimizer = owner.embedding.layout.optimizer_of(name)
            number = None
            if optimizer is not None:
                number, _ = optimizers.setdefault(id(optimizer), (len(optimizers), optimizer))
            tables.append(draft_table(owner, name, keys[position, name], number))
    root = os.path.dirname(identity.folder)
    open_windows = {
        owner.path: {str(length): count for length, count in owner.embedding.layout.windows.items() if count}
        for owner in owners
    }
    return Manifest(
        id=identity.id,
        kind=identity.kind,
        base=identity.base,
        previous=identity.previous,
        sequence=identity.sequence,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        world_size=1,
        tables=tables,
        optimizers=[_optimizer(optimizer) for _, optimizer in optimizers.values()],
        windows={path: counts for path, counts in open_windows.items() if counts},
        files=[],
        folders=[os.path.relpath(each, root) for each in identity.folders if each != root],
    )


def draft_table(owner: TableOwner, name: str, key: str, optimizer: int | None = None) -> SavedTable:
    """Returns the manifest entry of a table, with row count and clocks left empty.

    Args:
        owner: module that holds the table.
        name: name of the table.
        key: key of the table in the save.
        optimizer: index of the table's optimizer in the manifest; None without an optimizer.
    """
    config, view = owner.configs[name], owner.embedding.view(name)
    lifecycle = view.config.lifecycle
    return SavedTable(
        key=key,
        name=name,
        module=owner.path,
        num_embeddings=config.num_embeddings,
        embedding_dim=config.embedding_dim,
        hashed=config.hashed,
        capacity=config.capacity,
        pooling=config.pooling.value,
        weight_dtype=DTYPE_NAMES[config.weight_dtype],
        seed=owner.embedding.options.seed,
        parts={part: shape[0] for part, shape in view.parts().items()},
        optimizer=optimizer,
        rows=0,
        columns={name: "F64" if name == "score" else "I64" for name in (lifecycle.columns() if lifecycle else [])},
        clocks={},
    )


def _optimizer(optimizer: TableOptimizer) -> SavedOptimizer:
    cls = f"{optimizer.cls.__module__}.{optimizer.cls.__qualname__}"
    return SavedOptimizer(
        cls, optimizer.spec.kernel, optimizer.plain_options(), optimizer.step, optimizer.accumulate_step
    )


def current_formats(owners: Sequence[TableOwner]) -> RowFormats:
    """Returns the row formats of a model's tables, as a save made now would store them."""
    return row_formats([draft_table(owner, name, name) for owner in owners for name in owner.configs])
