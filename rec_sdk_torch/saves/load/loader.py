"""A save on its way into a model: everything that can be wrong is found before the first row changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...runtime.warn import SaveWarning, warn
from ...tbe import CapacityError, Replacement, TableOptimizer, TableSource, warn_of_rows
from ..format.errors import CheckpointError
from ..format.manifest import WINDOW, Formats, Manifest, RowFormat, SavedOptimizer
from ..format.validation import SavedTables, count_problem, evicted_files
from ..owners import Owner
from ..participants import Team
from .save_reader import Match, evicted, layers, lifecycle, window


def check(found: Sequence[Match]) -> list[int]:
    """Whether the tables fit the model; how many rows of each are at home here.

    Raises:
        CheckpointError: options that no update may use, or ids that cannot be.
        CapacityError: too many ids.
        RuntimeError: batches are in flight.
    """
    for layout in {id(each.view.layout): each.view.layout for each in found}.values():
        layout.check_not_in_flight("a load")
    checked = set()
    for each, optimizer, saved in _optimizers(found):
        if (id(optimizer), id(saved)) in checked:
            continue
        checked.add((id(optimizer), id(saved)))
        options = {**optimizer.options, **_options(optimizer, saved)}
        try:
            optimizer.check_options(options, f"{each.folder}: the optimizer of table {each.name!r}")
        except (TypeError, ValueError) as error:
            raise CheckpointError(str(error)) from error
    return [_checked_rows(each) for each in found]


def _optimizers(found: Sequence[Match]) -> list[tuple[Match, TableOptimizer, SavedOptimizer]]:
    """Returns tables whose optimizer goes on where a saved one was, with both."""
    pairs = [(each, each.optimizer, each.saved.optimizer) for each in found if each.same_optimizer]
    return [
        (each, optimizer, each.manifest.optimizers[number])
        for each, optimizer, number in pairs
        if optimizer is not None and number is not None
    ]


def _checked_rows(found: Match) -> int:
    config, capacity = found.owner.configs[found.name], found.view.config.capacity
    bound = None if config.hashed or found.cut is not None else config.num_embeddings
    tables = SavedTables(found.tables.chain, lambda ids: found.owner.mine(found.name, ids), bound, found.cut)
    rows = tables.check_ids()
    evicted_files(tables)
    if config.hashed and 0 < capacity < rows:
        raise CapacityError(f"{found.folder}: table {found.name!r} has {rows} ids, its capacity here is {capacity}")
    return rows


def check_counts(found: Sequence[Match], of_ranks: Sequence[Sequence[int]]) -> None:
    """
    Args:
        of_ranks: what `check` gave on each.

    Raises:
        CheckpointError: a table has not the rows that it had when it was saved.
    """
    for each, *rows in zip(found, *of_ranks, strict=True):
        problem = count_problem(each.saved, sum(rows) if each.owner.shares(each.name) else rows[0], each.rows)
        if problem is not None:
            raise CheckpointError(f"{each.folder}: {problem}")


def replacements(owners: Sequence[Owner], found: Sequence[Match], beside: bool) -> list[Replacement]:
    """Makes replacements of each owner's tables by the save; `beside`: there is room for both."""
    result = []
    for owner in owners:
        own = [each for each in found if each.owner is owner]
        windows = _windows(own)
        of_tables = {id(optimizer): (optimizer, saved) for _, optimizer, saved in _optimizers(own)}
        optimizers = [(optimizer, saved.step, _options(optimizer, saved)) for optimizer, saved in of_tables.values()]
        sources = [_source(each, bool(windows)) for each in own]
        result.append(Replacement(owner.embedding.layout, sources, optimizers, windows, beside=beside))
    return result


def put_in_place(team: Team, owners: Sequence[Owner], made: Sequence[Replacement]) -> list[str]:
    """Makes the tables of all owners on all ranks what was saved, or none of them.

    Returns:
        names of tables of which some rank rounded weights to the data type of its cache; a warning names them.
    """

    def prepare() -> list[str]:
        for each in made:
            each.prepare()
        return [name for each in made for name in each.rounded]

    try:
        of_ranks = team.together(prepare, "whether all ranks can load a save")
    except BaseException:
        for each in made:
            each.drop()
        raise
    for owner, each in zip(owners, made, strict=True):
        owner.embedding.layout.locks.run_resumable(each)
    rounded = sorted({name for names in of_ranks for name in names})
    if rounded:
        warn(
            f"tables {rounded}: weights of the save are not numbers of the table's cache_dtype, and are rounded to it; "
            "a TableReader of the save has them as they are there. The next save is a full one",
            SaveWarning,
        )
    return rounded


def _source(found: Match, with_window: bool) -> TableSource:
    view, placement = found.view, found.owner.placements.get(found.name)
    size = view.chunk_rows()
    rows = found.rows if placement is None else placement.most_rows(found.rows)
    return TableSource(
        view,
        lambda: layers(found, size),
        lambda: window(found, size) if with_window else iter(()),
        lifecycle(found),
        rows,
        lambda: evicted(found),
    )


def _options(optimizer: TableOptimizer, saved: SavedOptimizer) -> dict[str, Any]:
    """Options that the saved optimizer had, in the types that the class has them in.

    Weight decay of another kernel is of another kind, as that of AdamW is for Adam: then the model keeps its own.
    """
    other = {"weight_decay"} if saved.kernel != optimizer.spec.kernel else set()
    common = {name: value for name, value in saved.options.items() if name in optimizer.options.keys() - other}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in common.items()}


def _windows(found: Sequence[Match]) -> dict[int, int]:
    """Backward passes of the open windows; none where the tables cannot go on with them."""
    manifest = found[0].manifest
    counts = {int(length): count for length, count in manifest.windows.get(found[0].saved.module, {}).items()}
    lengths = set()
    fits = True
    for each in found:
        optimizer = each.optimizer
        lengths.add(optimizer.accumulate_step if optimizer else 1)
        saved = None if each.saved.optimizer is None else manifest.optimizers[each.saved.optimizer]
        same = optimizer is not None and saved is not None and saved.accumulate_step == optimizer.accumulate_step
        fits = fits and (same or not manifest.files_of(each.saved.key, WINDOW))
    return counts if fits and set(counts) <= lengths else {}


def warn_of_losses(found: Sequence[Match], folder: Path, manifest: Manifest) -> None:
    """Says what of the save the model does not take over."""
    for each in found:
        config = each.owner.configs[each.name]
        if not config.hashed and not each.saved.hashed and config.num_embeddings != each.saved.num_embeddings:
            warn_of_rows(each.name, each.saved.num_embeddings, config.num_embeddings, "begin anew")
    plain = [each.name for each in found if each.saved.optimizer is not None and not each.same_optimizer]
    if plain:
        warn(
            f"{folder}: tables {plain} have another optimizer than the save: only their weights are loaded", SaveWarning
        )
    for each in found:
        rows = sum(file.rows - begin for _, _, file, begin in evicted_files(each.tables))
        if rows and each.name not in each.owner.embedding.layout.evicted:
            warn(
                f"{folder}: {rows} rows had left table {each.name!r} and were not taken: they are left out, since the "
                "table has no keep_evicted",
                SaveWarning,
            )
    loaded = {each.saved.key for each in found}
    left = [table.key for table in manifest.tables if table.key not in loaded]
    if left:
        warn(f"{folder}: its tables {left} are not in the model, and are left out", SaveWarning)
    for owner in {id(each.owner): each.owner for each in found}.values():
        own = [each for each in found if each.owner is owner]
        if manifest.windows.get(own[0].saved.module) and not _windows(own):
            warn(
                f"{folder}: has an open accumulation window of {manifest.windows[own[0].saved.module]}, which "
                f"{[each.name for each in own]} cannot go on with: its gradients are left out",
                SaveWarning,
            )


def can_be_followed(found: Sequence[Match], last: Manifest, now: Formats) -> bool:
    """Whether a delta of the tables can follow the save `last`: they have all that it has, in the same format.

    `now`: the formats of the tables that were found, in their order.
    """
    same = (_is_as_saved(each, own) for each, (_, _, own) in zip(found, now, strict=True))
    return len(found) == len(last.tables) and all(same)


def _is_as_saved(found: Match, now: RowFormat) -> bool:
    return now == found.saved.row_format and set(found.parts) == set(now.parts)
