"""Finds what a save says of the tables of a model, and reads its rows in their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ...formulas import same_states
from ...rules import Sketch
from ...runtime.worker import Pool
from ...tbe import EvictedRows
from ...tbe.cache.batch import Int64Array
from ...tbe.config.life import TableLife
from ...tbe.rows.replacement import LifeState, Removed, Rows
from ...tbe.rows.row_parts import WEIGHT
from ...tbe.rows.table_view import TableView
from ..format.contents import (
    SavedTables,
    check_tensors,
    check_values,
    count_problem,
    evicted_files,
    open_file,
    open_unchecked,
    saved_table,
    saved_tables,
)
from ..format.errors import CheckpointError
from ..format.manifest import CANDIDATES, REMOVED, ROWS, SKETCH, WINDOW, Chain, Manifest, SavedTable
from ..format.quantized import BITS
from ..format.sketches import sketches_of
from ..format.tensors import TensorReader
from ..owners import Owner


@dataclass(frozen=True, eq=False)
class Match:
    """A table of a model and what a chain of saves has of it.

    Attributes:
        owner, name: the table of the model.
        view: the same.
        tables: in each save of the chain.
        keys: what it is called there.
        saved: in the last save.
        parts: of a row, those that are loaded.
        cut: ids from here on are left out, as an index table has no such rows that was saved with more; None: none is.
    """

    owner: Owner
    name: str
    view: TableView
    tables: SavedTables
    keys: list[str]
    saved: SavedTable
    parts: tuple[str, ...]
    cut: int | None = None

    @property
    def rows(self) -> int:
        """Rows that are loaded, in all ranks."""
        return self.saved.rows if self.cut is None else min(self.saved.rows, self.cut)

    def mine(self, ids: Int64Array) -> np.ndarray | None:
        """Which of the ids are to be loaded here; None for all."""
        mine = self.owner.mine(self.name, ids)
        if self.cut is not None:
            mine = (ids < self.cut) & (True if isinstance(mine, slice) else mine)
        return None if isinstance(mine, slice) else mine


def verify(chain: Chain, rank: int = 0, world_size: int = 1) -> None:
    """Reads every file of the saves; with several ranks, each its share.

    Raises:
        CheckpointError: one is missing or damaged, or has not what its role needs.
    """
    all_files = [(folder, manifest, file) for folder, manifest in chain for file in manifest.files]
    for folder, manifest, file in all_files[rank::world_size]:
        with open_unchecked(folder, file, manifest.packs) as reader:
            reader.verify(file.bytes, file.checksums)
            wrong = [name for name, spec in reader.specs.items() if spec.shape[0] != file.rows]
            if wrong:
                raise CheckpointError(f"{reader.path}: tensors {wrong} have not the {file.rows} rows of the manifest")
            check_tensors(reader, manifest, file)
            reader.checked = file
            check_values(reader, manifest, file)


def verify_tables(chain: Chain) -> None:
    """Reads the ids of every table of the last save. All its files are in order, each by itself.

    Raises:
        CheckpointError: ids that do not fit each other, or that are missing.
    """
    folder, last = chain[-1]
    for saved in last.tables:
        tables = saved_tables(chain, saved)
        rows = tables.check_ids()
        evicted_files(tables)
        problem = count_problem(saved, rows, saved.rows)
        if problem is not None:
            raise CheckpointError(f"{folder}: {problem}")


def match(owners: Sequence[Owner], chain: Chain) -> list[Match]:
    """The tables of a model in a chain of saves, by module and name; by name where that is clear.

    Raises:
        CheckpointError: a table that the save does not have, or has with rows that the model's cannot have.
    """
    folder, last = chain[-1]
    names = Counter(name for owner in owners for name in owner.configs)
    matches = []
    for owner in owners:
        for name, config in owner.configs.items():
            saved = saved_table(last, folder, owner.path, name, names[name] == 1)
            if saved.weight_dtype in BITS:
                raise CheckpointError(
                    f"{folder}: rows of table {name!r} have {BITS[saved.weight_dtype]} bits, for serving alone: load "
                    "the save that it was made from"
                )
            tables = saved_tables(chain, saved)
            if saved.embedding_dim != config.embedding_dim:
                raise CheckpointError(
                    f"{folder}: table {name!r} has embedding_dim {saved.embedding_dim}, the model's "
                    f"{config.embedding_dim}"
                )
            fewer = not saved.hashed and not config.hashed and saved.num_embeddings > config.num_embeddings
            cut = config.num_embeddings if fewer else None
            view, keys = owner.embedding.view(name), [table.key for _, _, table in tables.chain]
            matches.append(Match(owner, name, view, tables, keys, saved, _parts(owner, view, saved, chain[-1]), cut))
    return matches


def _parts(owner: Owner, view: TableView, saved: SavedTable, save: tuple[Path, Manifest]) -> tuple[str, ...]:
    """All parts of a row where the optimizer is of the family that saved them; else its weight."""
    folder, manifest = save
    if not same_family(owner, view.config.name, saved, manifest):
        return (WEIGHT,)
    shapes = {part: shape[0] for part, shape in view.parts().items()}
    if shapes != saved.parts:
        raise CheckpointError(
            f"{folder}: table {saved.key!r} has parts {saved.parts}, with the same optimizer the model has {shapes}"
        )
    return tuple(shapes)


def same_family(owner: Owner, name: str, saved: SavedTable, manifest: Manifest) -> bool:
    """Whether the states of a saved table mean the same to the table's optimizer."""
    optimizer = owner.embedding.layout.optimizer_of(name)
    if optimizer is None or saved.optimizer is None:
        return optimizer is None and saved.optimizer is None
    return same_states(manifest.optimizers[saved.optimizer].kernel, optimizer.spec.kernel)


def layers(found: Match, chain: Chain, rows: int) -> Iterator[Rows | Removed]:
    """The steps that make the table from an empty one: so many rows at a time, those that are at home here.

    A thread reads the next ones meanwhile, where they are many.
    """
    pieces = _layers(found, chain, rows)
    saves = zip(found.keys, chain, strict=True)
    if sum(file.rows for key, (_, manifest) in saves for file in manifest.files_of(key, REMOVED, ROWS)) <= rows:
        yield from pieces
        return
    with Pool("rec_sdk_torch.checkpoint") as thread:
        coming = thread.submit(next, pieces, None)
        while (piece := coming.result()) is not None:
            coming = thread.submit(next, pieces, None)
            yield piece


def _layers(found: Match, chain: Chain, rows: int) -> Iterator[Rows | Removed]:
    for key, (folder, manifest) in zip(found.keys, chain, strict=True):
        for file in manifest.files_of(key, REMOVED, ROWS):
            with open_file(folder, manifest, file) as reader:
                for begin in range(0, file.rows, rows):
                    end = min(begin + rows, file.rows)
                    ids = reader.read("ids", begin, end)
                    mine = _mine(found, ids)
                    if file.role == REMOVED:
                        yield Removed(ids if mine is None else ids[mine])
                        continue
                    parts = {}
                    for part in found.parts:
                        values = reader.read(part if part == WEIGHT else f"state.{part}", begin, end)
                        parts[part] = values if mine is None else values[mine]
                    columns = _columns(found, reader, begin, end, mine)
                    yield Rows(ids if mine is None else ids[mine], parts, columns)


def _kept(found: Match) -> list[str]:
    """Columns of a row that both the save and the table have."""
    life = found.view.config.life
    return [name for name in (life.columns() if life else []) if name in found.saved.columns]


def _columns(
    found: Match, reader: TensorReader, begin: int, end: int, mine: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    there = [name for name in _kept(found) if f"column.{name}" in reader.specs]
    values = {name: reader.read(f"column.{name}", begin, end) for name in there}
    return values if mine is None else {name: column[mine] for name, column in values.items()}


def life(found: Match, chain: Chain) -> LifeState | None:
    """The state that admission and eviction of the table go by; None where it or the save has none."""
    config = found.view.config
    if config.life is None or not found.saved.clocks:
        return None
    if not config.life.counts_candidates:
        return LifeState(found.saved.clocks, None)
    names = list(found.view.candidates()[1])
    return LifeState(found.saved.clocks, _candidates(found, chain, names), _sketches(found, chain, config.life))


def _candidates(found: Match, chain: Chain, names: Sequence[str]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the candidates at home here, of all ranks' files, and those of the named columns that the files have."""
    folder, manifest = chain[-1]
    all_ids = [torch.empty(0, dtype=torch.int64, device="cpu")]
    columns = {name: list(all_ids) for name in names}
    for file in manifest.files_of(found.keys[-1], CANDIDATES):
        with open_file(folder, manifest, file) as reader:
            ids = reader.read("ids")
            mine = _mine(found, ids)
            all_ids.append(ids if mine is None else ids[mine])
            columns = {name: parts for name, parts in columns.items() if f"column.{name}" in reader.specs}
            for name, parts in columns.items():
                values = reader.read(f"column.{name}")
                parts.append(values if mine is None else values[mine])
    return torch.cat(all_ids), {name: torch.cat(parts) for name, parts in columns.items()}


def _sketches(found: Match, chain: Chain, life: TableLife) -> list[torch.Tensor]:
    """The states of sketches that the table's counts at least as much as; none where it has no sketch."""
    if not life.rule(Sketch):
        return []
    folder, manifest = chain[-1]
    saved = []
    for file in manifest.files_of(found.keys[-1], SKETCH):
        with open_file(folder, manifest, file) as reader:
            saved.append(reader.read(SKETCH))
    return sketches_of(found.owner, found.name, saved)


def _mine(found: Match, ids: torch.Tensor) -> torch.Tensor | None:
    """Which of the ids are at home here, bool `[n]`; None for all."""
    mine = found.mine(ids.numpy())
    return None if mine is None else torch.from_numpy(np.ascontiguousarray(mine))


def evicted(found: Match) -> list[EvictedRows]:
    """Rows at home here that have left the table and were not taken, of all ranks' files; none where it keeps none."""
    if found.name not in found.owner.embedding.layout.evicted:
        return []
    result = []
    for folder, manifest, file, begin in evicted_files(found.tables):
        with open_file(folder, manifest, file) as reader:
            ids, weight, reason = (reader.read(name, begin, file.rows) for name in ("ids", WEIGHT, "reason"))
            states = {part: reader.read(f"state.{part}", begin, file.rows) for part in found.parts if part != WEIGHT}
            rows = EvictedRows(ids, weight, states, _columns(found, reader, begin, file.rows, None), reason)
            mine = _mine(found, ids)
            result.append(rows if mine is None else rows[mine])
    return result


def window(found: Match, chain: Chain, rows: int) -> Iterator[tuple[Int64Array, torch.Tensor]]:
    """Pending gradients of the table's rows that are at home here: ids, float32 `[n, 2 * D]`."""
    folder, manifest = chain[-1]
    for file in manifest.files_of(found.keys[-1], WINDOW):
        with open_file(folder, manifest, file) as reader:
            for begin in range(0, file.rows, rows):
                end = min(begin + rows, file.rows)
                ids, sums = reader.read("ids", begin, end), reader.read("sums", begin, end)
                mine = _mine(found, ids)
                yield (ids if mine is None else ids[mine]).numpy(), sums if mine is None else sums[mine]
