"""A save on its way into a model: everything that can be wrong is found before the first row changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .._engine import available_memory
from ..tbe import CapacityError, TableOptimizer
from ..tbe.batch import Int64Array
from ..tbe.parts import WEIGHT
from ..tbe.whole import Replacement, TableSource, piece_rows
from ..warn import warn
from .errors import CheckpointError
from .manifest import REMOVED, ROWS, WINDOW, SavedOptimizer
from .owners import Owner
from .reading import Chain, Match, layers, life, same_family, window
from .tensors import TensorReader


def check(found: Sequence[Match], chain: Chain) -> None:
    """Whether the rows fit the model, as far as that can be known.

    Raises:
        CheckpointError: rows that an index table lacks.
        CapacityError, MemoryError: too many rows.
        RuntimeError: batches are in flight.
    """
    need = 0
    for each in found:
        owner, view = each.owner, each.owner.embedding.view(each.name)
        if owner.embedding.in_flight():
            raise RuntimeError(
                "batches are in flight: run their backward, or drop the outputs of their forward, before a load"
            )
        config = owner.configs[each.name]
        group, table = view._open()
        need += _rows(each) * group.stored_bytes(table) - group.engine.memory(table)["store_bytes"]
        if not config.hashed and each.saved.hashed:
            _check_range(each, chain, config.num_embeddings)
        if view.config.capacity and config.hashed:
            count = len(_final_ids(each, chain))
            if count > view.config.capacity:
                raise CapacityError(
                    f"{chain[-1][0]}: table {each.name!r} has {count} ids, its capacity here is {view.config.capacity}"
                )
    free = available_memory()
    if need > free:
        raise MemoryError(f"{chain[-1][0]}: its rows need {need} bytes of host memory, {free} are free")


def _ids(found: Match, chain: Chain) -> Iterator[tuple[str, str, Int64Array]]:
    """(role, file, ids that are at home here) of each file of ids, in order."""
    for key, (folder, manifest) in zip(found.keys, chain, strict=True):
        for file in manifest.files_of(key, REMOVED, ROWS):
            with TensorReader(folder / file.path) as reader:
                ids = reader.read("ids").numpy()
            yield file.role, str(reader.path), ids[found.owner.mine(found.name, ids)]


def _check_range(found: Match, chain: Chain, rows: int) -> None:
    for _, file, ids in _ids(found, chain):
        bad = ids[(ids < 0) | (ids >= rows)]
        if len(bad):
            raise CheckpointError(
                f"{file}: {len(bad)} ids (such as {bad[0]}) are no rows of the index table {found.name!r}, which has "
                f"num_embeddings {rows}"
            )


def _final_ids(found: Match, chain: Chain) -> Int64Array:
    known: Int64Array = np.empty(0, np.int64)
    for role, _, ids in _ids(found, chain):
        known = np.setdiff1d(known, ids) if role == REMOVED else np.union1d(known, ids)
    return known


def replace(owners: Sequence[Owner], found: Sequence[Match], chain: Chain) -> None:
    """Puts the save in the place of the tables."""
    manifest = chain[-1][1]
    for owner in owners:
        own = [each for each in found if each.owner is owner]
        windows = _windows(own, chain)
        optimizers: dict[int, tuple[TableOptimizer, int, dict[str, Any]]] = {}
        for each in own:
            optimizer = owner.embedding.optimizer_of(each.name)
            if optimizer is not None and each.saved.optimizer is not None:
                saved = manifest.optimizers[each.saved.optimizer]
                if same_family(owner, each.name, each.saved, manifest):
                    optimizers[id(optimizer)] = optimizer, saved.step, _options(optimizer, saved)
        sources = [_source(each, chain, bool(windows)) for each in own]
        owner.embedding.steps.do(Replacement(owner.embedding, sources, list(optimizers.values()), windows))


def _source(found: Match, chain: Chain, with_window: bool) -> TableSource:
    view = found.owner.embedding.view(found.name)
    rows = piece_rows(view)

    def waiting() -> Iterator[tuple[Int64Array, Any]]:
        return window(found, chain, rows) if with_window else iter(())

    return TableSource(view, lambda: layers(found, chain, rows), waiting, life(found, chain), _rows(found))


def _rows(found: Match) -> int:
    """Rows that are at home in this process, about."""
    placement = found.owner.placements.get(found.name)
    return found.saved.rows if placement is None else placement.most_rows(found.saved.rows)


def _options(optimizer: TableOptimizer, saved: SavedOptimizer) -> dict[str, Any]:
    """Options that the saved optimizer had, in the types that the class has them in."""
    common = {name: value for name, value in saved.options.items() if name in optimizer.options}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in common.items()}


def _windows(found: Sequence[Match], chain: Chain) -> dict[int, int]:
    """Backward passes of the open windows; none where the tables cannot go on with them."""
    manifest = chain[-1][1]
    counts = {int(length): count for length, count in manifest.windows.get(found[0].saved.module, {}).items()}
    lengths = set()
    fits = True
    for each in found:
        optimizer = each.owner.embedding.optimizer_of(each.name)
        lengths.add(optimizer.accumulate_step if optimizer else 1)
        waits = bool(manifest.files_of(each.keys[-1], WINDOW))
        saved = None if each.saved.optimizer is None else manifest.optimizers[each.saved.optimizer]
        same = optimizer is not None and saved is not None and saved.accumulate_step == optimizer.accumulate_step
        fits = fits and (same or not waits)
    return counts if fits and set(counts) <= lengths else {}


def warn_of_losses(found: Sequence[Match], chain: Chain) -> None:
    """Says what of the save the model does not take over."""
    folder, manifest = chain[-1]
    plain = [
        each.name
        for each in found
        if each.saved.optimizer is not None and not same_family(each.owner, each.name, each.saved, manifest)
    ]
    if plain:
        warn(f"{folder}: tables {plain} have another optimizer than the save: only their weights are loaded")
    loaded = {each.saved.key for each in found}
    left = [table.key for table in manifest.tables if table.key not in loaded]
    if left:
        warn(f"{folder}: its tables {left} are not in the model, and are left out")
    for owner in {id(each.owner): each.owner for each in found}.values():
        own = [each for each in found if each.owner is owner]
        if manifest.windows.get(own[0].saved.module) and not _windows(own, chain):
            warn(
                f"{folder}: has an open accumulation window of {manifest.windows[own[0].saved.module]}, which "
                f"{[each.name for each in own]} cannot go on with: its gradients are left out"
            )


def takes_all(found: Sequence[Match]) -> bool:
    """Whether the tables are now just what was saved, so that a delta can follow."""
    return all(set(each.parts) == {WEIGHT} | set(each.saved.parts) for each in found)
