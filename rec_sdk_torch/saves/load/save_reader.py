"""Finds the tables of a model in a chain of saves, and reads their rows in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ...formulas import same_states
from ...rules import Sketch
from ...runtime.worker import Pool
from ...tbe import WEIGHT, EvictedRows, Int64Array, LifecycleState, RemovedIds, SavedRows, TableOptimizer, TableView
from ..format.errors import CheckpointError
from ..format.manifest import CANDIDATES, REMOVED, ROWS, SKETCH, WINDOW, Chain, Manifest, SavedTable
from ..format.quantized import BITS
from ..format.sketches import relevant_sketches
from ..format.tensors import TensorReader
from ..format.validation import (
    TableChain,
    check_tensors,
    check_values,
    evicted_files,
    find_saved_table,
    open_file,
    open_unchecked,
    row_count_problem,
    table_chain,
)
from ..owners import TableOwner


@dataclass(frozen=True, eq=False)
class TableMatch:
    """A table of a model and the saved table that it is loaded from.

    Attributes:
        owner, name: module that holds the table, and name of the table.
        view: read and write access to the table.
        table_chain: the saved table's entry in each save of the chain.
        saved: the saved table's entry in the last save.
        parts: names of the parts of a row that are loaded.
        same_optimizer: whether the saved optimizer states fit the table's optimizer, or neither table has an optimizer.
        id_limit: number of rows of the model's index table if the saved table is larger; other ids are ignored. None
            otherwise.
    """

    owner: TableOwner
    name: str
    view: TableView
    table_chain: TableChain
    saved: SavedTable
    parts: tuple[str, ...]
    same_optimizer: bool
    id_limit: int | None = None

    @property
    def folder(self) -> Path:
        """The folder of the last save."""
        return self.table_chain.saves[-1][0]

    @property
    def manifest(self) -> Manifest:
        """The manifest of the last save."""
        return self.table_chain.saves[-1][1]

    @property
    def optimizer(self) -> TableOptimizer | None:
        """The optimizer of the model's table; None if it has none."""
        return self.owner.embedding.layout.optimizer_of(self.name)

    @property
    def rows(self) -> int:
        """Number of rows to load, over all ranks."""
        return self.saved.rows if self.id_limit is None else min(self.saved.rows, self.id_limit)

    def owned(self, ids: Int64Array) -> np.ndarray | None:
        """Returns a mask of the `ids` that this rank loads; None if it loads all of them."""
        owned = self.owner.owned(self.name, ids)
        if self.id_limit is not None:
            owned = (ids < self.id_limit) & (True if isinstance(owned, slice) else owned)
        return None if isinstance(owned, slice) else owned


def verify_files(chain: Chain, rank: int = 0, world_size: int = 1) -> None:
    """Reads and checks every file of a chain of saves. The files are divided among `world_size` ranks.

    Raises:
        CheckpointError: a file is missing or damaged, or lacks tensors that its role requires.
    """
    all_files = [(folder, manifest, file) for folder, manifest in chain for file in manifest.files]
    for folder, manifest, file in all_files[rank::world_size]:
        with open_unchecked(folder, manifest, file) as reader:
            reader.verify(file.bytes, file.checksums)
            wrong = [name for name, spec in reader.specs.items() if spec.shape[0] != file.rows]
            if wrong:
                raise CheckpointError(
                    f"{reader.path}: tensors {wrong} do not have the {file.rows} rows that the manifest lists"
                )
            check_tensors(reader, manifest, file)
            reader.validated_for = file
            check_values(reader, manifest, file)


def verify_tables(chain: Chain) -> None:
    """Reads the ids of all tables of the last save and checks that they agree across files; call `verify_files` first.

    Raises:
        CheckpointError: ids in different files contradict each other, or ids are missing.
    """
    folder, last = chain[-1]
    for saved in last.tables:
        tables = table_chain(chain, saved)
        rows = tables.check_ids()
        evicted_files(tables)
        problem = row_count_problem(saved, rows, saved.rows)
        if problem is not None:
            raise CheckpointError(f"{folder}: {problem}")


def match_tables(owners: Sequence[TableOwner], chain: Chain) -> list[TableMatch]:
    """Finds the tables of a model in a chain of saves by module and name, or by name alone if it is unique.

    Raises:
        CheckpointError: the save lacks a table, or has rows that the model's table cannot hold.
    """
    folder, last = chain[-1]
    names = Counter(name for owner in owners for name in owner.configs)
    matches = []
    for owner in owners:
        for name, config in owner.configs.items():
            saved = find_saved_table(last, folder, owner.path, name, names[name] == 1)
            if saved.weight_dtype in BITS:
                raise CheckpointError(
                    f"{folder}: rows of table {name!r} have {BITS[saved.weight_dtype]} bits, for serving only: load "
                    "the save that was quantized"
                )
            saved_chain = table_chain(chain, saved)
            if saved.embedding_dim != config.embedding_dim:
                raise CheckpointError(
                    f"{folder}: table {name!r} has embedding_dim {saved.embedding_dim}, the model has "
                    f"{config.embedding_dim}"
                )
            fewer = not saved.hashed and not config.hashed and saved.num_embeddings > config.num_embeddings
            id_limit, view = config.num_embeddings if fewer else None, owner.embedding.view(name)
            optimizer, number = owner.embedding.layout.optimizer_of(name), saved.optimizer
            if optimizer is None or number is None:
                same = optimizer is None and number is None
            else:
                same = same_states(last.optimizers[number].kernel, optimizer.spec.kernel)
            parts = {part: shape[0] for part, shape in view.parts().items()} if same else {WEIGHT: 1}
            if same and parts != saved.parts:
                raise CheckpointError(
                    f"{folder}: table {saved.key!r} has parts {saved.parts}, but the model, with the same optimizer, "
                    f"has {parts}"
                )
            matches.append(TableMatch(owner, name, view, saved_chain, saved, tuple(parts), same, id_limit))
    return matches


def read_layers(match: TableMatch, rows: int) -> Iterator[SavedRows | RemovedIds]:
    """Yields chunks of up to `rows` rows or removed ids, which rebuild this rank's part of a table if applied in order.

    If the table has more than `rows` rows, a thread reads the next chunk in advance.
    """
    chunks = _read_layers(match, rows)
    files_by_save = [manifest.files_of(table.key, REMOVED, ROWS) for _, manifest, table in match.table_chain.saves]
    if sum(file.rows for files in files_by_save for file in files) <= rows:
        yield from chunks
        return
    with Pool("rec_sdk_torch.checkpoint") as thread:
        next_chunk = thread.submit(next, chunks, None)
        while (chunk := next_chunk.result()) is not None:
            next_chunk = thread.submit(next, chunks, None)
            yield chunk


def _read_layers(match: TableMatch, rows: int) -> Iterator[SavedRows | RemovedIds]:
    for folder, manifest, table in match.table_chain.saves:
        for file in manifest.files_of(table.key, REMOVED, ROWS):
            with open_file(folder, manifest, file) as reader:
                names = [] if file.role == REMOVED else _tensor_names(match, reader)
                for begin in range(0, file.rows, rows):
                    ids, tensors = _read_owned(match, reader, names, begin, min(begin + rows, file.rows))
                    yield RemovedIds(ids) if file.role == REMOVED else SavedRows(ids, *_parts_and_columns(tensors))


def _read_owned(
    match: TableMatch, reader: TensorReader, names: Sequence[str], begin: int = 0, end: int | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Reads ids and the tensors `names` of rows [begin, end), and selects the rows that this rank loads."""
    ids = reader.read("ids", begin, end)
    tensors = {name: reader.read(name, begin, end) for name in names}
    owned = match.owned(ids.numpy())
    if owned is None:
        return ids, tensors
    chosen = torch.from_numpy(np.ascontiguousarray(owned))
    return ids[chosen], {name: values[chosen] for name, values in tensors.items()}


def _tensor_names(match: TableMatch, reader: TensorReader) -> list[str]:
    """Returns the names of the tensors to load from a file of rows: parts, and columns that the table has too."""
    names = [part if part == WEIGHT else f"state.{part}" for part in match.parts]
    lifecycle = match.view.config.lifecycle
    if lifecycle is not None:
        columns = [f"column.{name}" for name in lifecycle.columns() if name in match.saved.columns]
        names += [name for name in columns if name in reader.specs]
    return names


def _parts_and_columns(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Splits the tensors of a file of rows into parts and columns, by the names that the table uses for them."""
    parts: dict[str, torch.Tensor] = {}
    columns: dict[str, torch.Tensor] = {}
    for name, values in tensors.items():
        kind, _, table_name = name.partition(".")
        (columns if kind == "column" else parts)[table_name or name] = values
    return parts, columns


def read_lifecycle_state(match: TableMatch) -> LifecycleState | None:
    """Reads the saved clocks, candidates and sketches for a table's admission and eviction rules.

    Returns None if the table has no such rules or the save has no clocks.
    """
    rules = match.view.config.lifecycle
    if rules is None or not match.saved.clocks:
        return None
    if not rules.counts_candidates:
        return LifecycleState(match.saved.clocks, None)
    names = list(match.view.candidates()[1])
    return LifecycleState(
        match.saved.clocks, _read_candidates(match, names), _read_sketches(match) if rules.rule(Sketch) else []
    )


def _read_candidates(match: TableMatch, names: Sequence[str]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the candidates that this rank owns, from all ranks' files, and the columns in `names` that exist."""
    chunks = []
    folder, manifest, table = match.table_chain.saves[-1]
    for file in manifest.files_of(table.key, CANDIDATES):
        with open_file(folder, manifest, file) as reader:
            names = [name for name in names if f"column.{name}" in reader.specs]
            chunks.append(_read_owned(match, reader, [f"column.{name}" for name in names]))
    empty = torch.empty(0, dtype=torch.int64, device="cpu")
    ids = torch.cat([empty, *(ids for ids, _ in chunks)])
    return ids, {name: torch.cat([empty, *(columns[f"column.{name}"] for _, columns in chunks)]) for name in names}


def _read_sketches(match: TableMatch) -> list[torch.Tensor]:
    """Returns the saved sketch states to restore the table's sketch from; see `relevant_sketches`."""
    saved = []
    folder, manifest, table = match.table_chain.saves[-1]
    for file in manifest.files_of(table.key, SKETCH):
        with open_file(folder, manifest, file) as reader:
            saved.append(reader.read(SKETCH))
    return relevant_sketches(match.owner, match.name, saved)


def read_evicted(match: TableMatch) -> list[EvictedRows]:
    """Reads the pending evicted rows that this rank owns; returns none if the table does not keep evicted rows."""
    if match.name not in match.owner.embedding.layout.evicted:
        return []
    result = []
    for folder, manifest, file, begin in evicted_files(match.table_chain):
        with open_file(folder, manifest, file) as reader:
            ids, tensors = _read_owned(match, reader, [*_tensor_names(match, reader), "reason"], begin, file.rows)
            reason = tensors.pop("reason")
            states, columns = _parts_and_columns(tensors)
            result.append(EvictedRows(ids, states.pop(WEIGHT), states, columns, reason))
    return result


def read_pending_gradients(match: TableMatch, rows: int) -> Iterator[tuple[Int64Array, torch.Tensor]]:
    """Yields the saved accumulation buffers of this rank's rows in chunks: ids, and sums as float32 `[n, 2 * D]`."""
    folder, manifest, table = match.table_chain.saves[-1]
    for file in manifest.files_of(table.key, WINDOW):
        with open_file(folder, manifest, file) as reader:
            for begin in range(0, file.rows, rows):
                ids, tensors = _read_owned(match, reader, ["sums"], begin, min(begin + rows, file.rows))
                yield ids.numpy(), tensors["sums"]
