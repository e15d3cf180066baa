"""Checks that a save fits a model, and replaces the model's tables. No row changes until all checks have passed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...runtime.warn import SaveWarning, warn
from ...tbe import CapacityError, Replacement, TableOptimizer, TableSource, warn_of_rows
from ..format.errors import CheckpointError
from ..format.manifest import WINDOW, Manifest, RowFormat, RowFormats, SavedOptimizer
from ..format.validation import TableChain, evicted_files, row_count_problem
from ..owners import TableOwner
from ..participants import Participants
from .save_reader import TableMatch, read_evicted, read_layers, read_lifecycle_state, read_pending_gradients


def check_fit(matches: Sequence[TableMatch]) -> list[int]:
    """Checks that the tables of a save fit the model.

    Returns:
        The number of rows of each table that this rank owns.

    Raises:
        CheckpointError: optimizer options or ids are invalid.
        CapacityError: a table has more ids than its capacity.
        RuntimeError: batches are in flight.
    """
    for layout in {id(each.view.layout): each.view.layout for each in matches}.values():
        layout.check_not_in_flight("a load")
    checked = set()
    for each, optimizer, saved in _continued_optimizers(matches):
        if (id(optimizer), id(saved)) in checked:
            continue
        checked.add((id(optimizer), id(saved)))
        options = {**optimizer.options, **_saved_options(optimizer, saved)}
        try:
            optimizer.check_options(options, f"{each.folder}: the optimizer of table {each.name!r}")
        except (TypeError, ValueError) as error:
            raise CheckpointError(str(error)) from error
    return [_check_rows(each) for each in matches]


def _continued_optimizers(matches: Sequence[TableMatch]) -> list[tuple[TableMatch, TableOptimizer, SavedOptimizer]]:
    """Returns each table whose optimizer continues from a saved one, with its optimizer and the saved one."""
    pairs = [(each, each.optimizer, each.saved.optimizer) for each in matches if each.same_optimizer]
    return [
        (each, optimizer, each.manifest.optimizers[number])
        for each, optimizer, number in pairs
        if optimizer is not None and number is not None
    ]


def _check_rows(match: TableMatch) -> int:
    config, capacity = match.owner.configs[match.name], match.view.config.capacity
    num_embeddings = None if config.hashed or match.id_limit is not None else config.num_embeddings
    tables = TableChain(
        match.table_chain.saves, lambda ids: match.owner.owned(match.name, ids), num_embeddings, match.id_limit
    )
    rows = tables.check_ids()
    evicted_files(tables)
    if config.hashed and 0 < capacity < rows:
        raise CapacityError(f"{match.folder}: table {match.name!r} has {rows} ids, its capacity here is {capacity}")
    return rows


def check_row_counts(matches: Sequence[TableMatch], by_rank: Sequence[Sequence[int]]) -> None:
    """Checks that each table's files have as many rows, over all ranks, as the table had when it was saved.

    Args:
        matches: the tables.
        by_rank: result of `check_fit` on each rank.

    Raises:
        CheckpointError: the files of a table have more or fewer rows.
    """
    for each, *rows in zip(matches, *by_rank, strict=True):
        problem = row_count_problem(each.saved, sum(rows) if each.owner.is_sharded(each.name) else rows[0], each.rows)
        if problem is not None:
            raise CheckpointError(f"{each.folder}: {problem}")


def make_replacements(
    owners: Sequence[TableOwner], matches: Sequence[TableMatch], fits_beside: bool
) -> list[Replacement]:
    """Creates the replacements of each owner's tables; `fits_beside`: whether old and new rows fit at the same time."""
    result = []
    for owner in owners:
        own = [each for each in matches if each.owner is owner]
        windows = _open_windows(own)
        of_tables = {id(optimizer): (optimizer, saved) for _, optimizer, saved in _continued_optimizers(own)}
        optimizers = [
            (optimizer, saved.step, _saved_options(optimizer, saved)) for optimizer, saved in of_tables.values()
        ]
        sources = [_table_source(each, bool(windows)) for each in own]
        result.append(Replacement(owner.embedding.layout, sources, optimizers, windows, keep_old=fits_beside))
    return result


def replace_tables(
    participants: Participants, owners: Sequence[TableOwner], replacements: Sequence[Replacement]
) -> list[str]:
    """Replaces the tables of all owners on all ranks, or on no rank if one rank fails (collective).

    Returns:
        Names of the tables whose weights some rank rounded to the data type of its cache; a warning lists them too.
    """

    def prepare() -> list[str]:
        for each in replacements:
            each.prepare()
        return [name for each in replacements for name in each.rounded]

    try:
        by_rank = participants.run_on_all(prepare, "whether all ranks can load a save")
    except BaseException:
        for each in replacements:
            each.drop()
        raise
    for owner, each in zip(owners, replacements, strict=True):
        owner.embedding.layout.locks.run_resumable(each)
    rounded = sorted({name for names in by_rank for name in names})
    if rounded:
        warn(
            f"tables {rounded}: weights of the save are rounded to the table's cache_dtype; a TableReader returns the "
            "exact weights. The next save is a full one",
            SaveWarning,
        )
    return rounded


def _table_source(match: TableMatch, with_window: bool) -> TableSource:
    view, placement = match.view, match.owner.placements.get(match.name)
    size = view.chunk_rows()
    rows = match.rows if placement is None else placement.max_own_rows(match.rows)
    return TableSource(
        view,
        lambda: read_layers(match, size),
        lambda: read_pending_gradients(match, size) if with_window else iter(()),
        read_lifecycle_state(match),
        rows,
        lambda: read_evicted(match),
    )


def _saved_options(optimizer: TableOptimizer, saved: SavedOptimizer) -> dict[str, Any]:
    """Returns the saved options that apply to the optimizer, in the types that its class uses.

    Weight decay has different meanings in different kernels, such as AdamW's and Adam's. If the kernels differ, the
    model keeps its own weight decay.
    """
    skipped = {"weight_decay"} if saved.kernel != optimizer.spec.kernel else set()
    common = {name: value for name, value in saved.options.items() if name in optimizer.options.keys() - skipped}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in common.items()}


def _open_windows(matches: Sequence[TableMatch]) -> dict[int, int]:
    """Returns the number of backward passes in each saved accumulation buffer, by its `accumulate_step`.

    The result is empty if the tables cannot continue with the saved buffers.
    """
    manifest = matches[0].manifest
    counts = {int(length): count for length, count in manifest.windows.get(matches[0].saved.module, {}).items()}
    lengths = set()
    fits = True
    for each in matches:
        optimizer = each.optimizer
        lengths.add(optimizer.accumulate_step if optimizer else 1)
        saved = None if each.saved.optimizer is None else manifest.optimizers[each.saved.optimizer]
        same = optimizer is not None and saved is not None and saved.accumulate_step == optimizer.accumulate_step
        fits = fits and (same or not manifest.files_of(each.saved.key, WINDOW))
    return counts if fits and set(counts) <= lengths else {}


def warn_of_skipped_content(matches: Sequence[TableMatch], folder: Path, manifest: Manifest) -> None:
    """Warns of the parts of a save that are not loaded into the model."""
    for each in matches:
        config = each.owner.configs[each.name]
        if not config.hashed and not each.saved.hashed and config.num_embeddings != each.saved.num_embeddings:
            warn_of_rows(each.name, each.saved.num_embeddings, config.num_embeddings, "begin anew")
    weights_only = [each.name for each in matches if each.saved.optimizer is not None and not each.same_optimizer]
    if weights_only:
        warn(
            f"{folder}: tables {weights_only} have another optimizer than the save: only their weights are loaded",
            SaveWarning,
        )
    for each in matches:
        rows = sum(file.rows - begin for _, _, file, begin in evicted_files(each.table_chain))
        if rows and each.name not in each.owner.embedding.layout.evicted:
            warn(
                f"{folder}: {rows} evicted rows of table {each.name!r} were not taken: they are not loaded, "
                "because the table has no keep_evicted",
                SaveWarning,
            )
    loaded = {each.saved.key for each in matches}
    unused = [table.key for table in manifest.tables if table.key not in loaded]
    if unused:
        warn(f"{folder}: its tables {unused} are not in the model, and are not loaded", SaveWarning)
    for owner in {id(each.owner): each.owner for each in matches}.values():
        own = [each for each in matches if each.owner is owner]
        if manifest.windows.get(own[0].saved.module) and not _open_windows(own):
            warn(
                f"{folder}: has an open accumulation window of {manifest.windows[own[0].saved.module]}, which "
                f"{[each.name for each in own]} cannot continue: its gradients are not loaded",
                SaveWarning,
            )


def can_be_base(matches: Sequence[TableMatch], last: Manifest, formats: RowFormats) -> bool:
    """Returns whether a delta can follow the loaded save `last`, because the tables hold all of it in `formats`."""
    same = (_is_as_saved(each, own) for each, (_, _, own) in zip(matches, formats, strict=True))
    return len(matches) == len(last.tables) and all(same)


def _is_as_saved(match: TableMatch, row_format: RowFormat) -> bool:
    return row_format == match.saved.row_format and set(match.parts) == set(row_format.parts)
