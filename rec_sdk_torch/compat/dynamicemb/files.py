"""Dumps in dynamicemb's file format: raw keys, values, scores and optimizer states of each table and rank.

The files of a table are:

- `<table>_emb_<item>.rank_<r>.world_size_<w>`, where the item is keys (int64), values (float32), scores (int64) or
  opt_values (float32);
- `<table>_counter_<item>.rank_<r>.world_size_<w>`, with keys and frequencies (int64) of ids that are not admitted;
- `<table>_opt_args.json`, with the optimizer's arguments, the eviction strategy, the `dist_type` and the score.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...runtime.warn import SaveWarning, warn
from ...tbe import WEIGHT, TableOptimizer, load
from .enums import BATCH_SIZE_PER_DUMP
from .optimizers import name_in_dumps
from .scores import TableScores, counts_of_dump, device_timestamp

OwnsIds = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.bool_]]
"""Function that returns which ids this rank owns."""


def _file_path(folder: Path, table: str, item: str, rank: int, world_size: int) -> Path:
    return folder / f"{table}_{item}.rank_{rank}.world_size_{world_size}"


def _optimizer_arguments(optimizer: TableOptimizer | None) -> dict[str, Any]:
    """Returns the optimizer's arguments for a dump, under dynamicemb's names; {} if dynamicemb lacks the optimizer."""
    name = None if optimizer is None else name_in_dumps(optimizer.cls)
    if optimizer is None or name is None:
        return {}
    options = optimizer.options
    found = {"opt_type": name, "lr": float(options["lr"])}
    found |= {key: options[key] for key in ("eps", "weight_decay", "initial_accumulator_value") if key in options}
    if "betas" in options:
        found["beta1"], found["beta2"] = options["betas"]
        found["iters"] = optimizer.step
    return found


def _apply_arguments(arguments: dict[str, Any], optimizer: TableOptimizer) -> None:
    """Sets the options of an optimizer to the arguments in a dump."""
    options = optimizer.options
    options |= {key: arguments[key] for key in ("lr", "eps", "weight_decay") if key in arguments and key in options}
    if "betas" in options and "beta1" in arguments:
        options["betas"] = (arguments["beta1"], arguments["beta2"])


def dump_table(scores: TableScores, folder: Path, rank: int, world_size: int, *, optim: bool, counter: bool) -> None:
    """Writes this rank's rows of a table; rank 0 also writes the table's `_opt_args.json`."""
    view, name = scores.view, scores.name
    states = [part for part in view.parts() if part != WEIGHT] if optim else []
    if rank == 0:
        arguments = _optimizer_arguments(view.layout.optimizer_of(name))
        arguments |= {
            "evict_strategy": str(scores.evict_strategy),
            "dist_type": scores.options.dist_type,
            "step_score": scores.current,
        }
        (folder / f"{name}_opt_args.json").write_text(json.dumps(arguments, indent=4))
    now = device_timestamp()
    items = ["emb_keys", "emb_values", "emb_scores", *(["emb_opt_values"] if optim else [])]
    paths = [_file_path(folder, name, item, rank, world_size) for item in items]
    for path in paths:
        path.write_bytes(b"")
    for chunk in view.chunks([WEIGHT, *states]):
        dumped = scores.dump_scores(chunk.ids)
        arrays = [chunk.ids, chunk.parts[WEIGHT].float(), now - dumped if scores.is_age_in_dumps else dumped]
        if states:
            arrays.append(torch.cat([chunk.parts[state].float() for state in states], dim=1))
        for path, values in zip(paths, arrays, strict=False):
            with path.open("ab") as file:
                file.write(values.contiguous().numpy().tobytes())
    if counter:
        ids, columns = view.candidates()
        for item, values in (("counter_keys", ids), ("counter_frequencies", columns["count"])):
            _file_path(folder, name, item, rank, world_size).write_bytes(values.numpy().tobytes())


def _file_paths(folder: Path, table: str, item: str) -> list[Path]:
    """Returns the files of an item, in rank order; [] if the item was not dumped.

    Raises:
        FileNotFoundError: files of some ranks are missing.
    """
    pattern = re.compile(rf"{re.escape(table)}_{item}\.rank_\d+\.world_size_(\d+)")
    found = [match for match in map(pattern.fullmatch, (path.name for path in folder.iterdir())) if match]
    if not found:
        return []
    world_size = int(found[0][1])
    paths = [_file_path(folder, table, item, rank, world_size) for rank in range(world_size)]
    missing = [path.name for path in paths if not path.exists()]
    if missing or len(found) != world_size:
        raise FileNotFoundError(f"{folder}: of {len(found)} files of table {table!r} and {item}, {missing} are missing")
    return paths


def _map_rows(path: Path, dtype: type[np.generic], width: int, rows: int | None) -> npt.NDArray[Any]:
    """Returns the content of a file as a memory map, `[rows, width]`.

    Raises:
        ValueError: the file's size is not a multiple of the row size, or does not match `rows`.
    """
    size, row_size = path.stat().st_size, np.dtype(dtype).itemsize * width
    if size % row_size or (rows is not None and size != rows * row_size):
        expected = "a multiple of" if rows is None else f"{rows} rows of"
        raise ValueError(f"{path}: it has {size} bytes, expected {expected} {row_size}")
    if not size:
        return np.empty((0, width), dtype)
    return np.memmap(path, dtype, mode="r", shape=(size // row_size, width))


def load_table(scores: TableScores, folder: Path, owns: OwnsIds, *, optim: bool, counter: bool) -> None:
    """Loads the rows that this rank owns from a dump that any number of ranks wrote.

    Rows that the table has and the dump does not contain are kept.

    Raises:
        FileNotFoundError: files of some ranks are missing.
        ValueError: a file has the wrong size, or the dumped table had another eviction strategy.
    """
    keys = _file_paths(folder, scores.name, "emb_keys")
    if not keys:
        warn(f"{folder} has no files of table {scores.name!r}, which stays as it is", SaveWarning)
        return
    arguments = json.loads((folder / f"{scores.name}_opt_args.json").read_text())
    strategy = arguments.get("evict_strategy", str(scores.evict_strategy))
    if strategy != str(scores.evict_strategy):
        raise ValueError(f"table {scores.name!r}: the dump has {strategy}, the table {scores.evict_strategy}")
    optimizer = scores.view.layout.optimizer_of(scores.name)
    with_states = optim and _check_states(
        scores.name, arguments, optimizer, _file_paths(folder, scores.name, "emb_opt_values")
    )
    dtypes = scores.view.dtypes()
    scored: list[tuple[torch.Tensor, torch.Tensor]] = []
    for rank in range(len(keys)):
        for ids, parts, kept in _read_chunks(scores, folder, rank, len(keys), owns, with_states):
            scores.view.write(ids, {name: part.to(dtypes[name]).contiguous() for name, part in parts.items()})
            scored += [] if kept is None else [(ids, kept)]
    if scored:  # `restore` derives batch numbers from the order of all scores, so it gets them in one call
        ids, kept = (torch.cat(each) for each in zip(*scored, strict=True))
        scores.restore(ids, device_timestamp() - kept if scores.is_age_in_dumps else kept)
    if with_states and optimizer is not None:
        _apply_arguments(arguments, optimizer)
        load(scores.view.layout, [], [(optimizer, int(arguments.get("iters", optimizer.step)))])
    scores.current = max(scores.current, int(arguments.get("step_score") or 0))
    if counter:
        _load_candidates(scores, folder, owns)


def _check_states(table: str, arguments: dict[str, Any], optimizer: TableOptimizer | None, files: list[Path]) -> bool:
    """Returns whether the table's optimizer can load the states of a dump; warns if it cannot."""
    own = None if optimizer is None else name_in_dumps(optimizer.cls)
    if not files or arguments.get("opt_type", own) != own:
        given = arguments.get("opt_type") if files else "none"
        warn(f"table {table!r}: the dump has states of {given}, not of {own}: they are not loaded", SaveWarning)
        return False
    return True


def _read_chunks(
    scores: TableScores, folder: Path, rank: int, world_size: int, owns: OwnsIds, with_states: bool
) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor | None]]:
    """Yields chunks: ids that this rank owns, their rows' weights and states, and the scores stored in the file."""
    view, name = scores.view, scores.name
    parts = view.parts()
    widths = {part: shape[0] for part, shape in parts.items() if part != WEIGHT}
    ids = _map_rows(_file_path(folder, name, "emb_keys", rank, world_size), np.int64, 1, None)[:, 0]
    path = _file_path(folder, name, "emb_values", rank, world_size)
    weights = _map_rows(path, np.float32, parts[WEIGHT][0], len(ids))
    path = _file_path(folder, name, "emb_scores", rank, world_size)
    kept = _map_rows(path, np.int64, scores.width, len(ids)) if path.exists() else None
    states = None
    if with_states and widths:
        path = _file_path(folder, name, "emb_opt_values", rank, world_size)
        states = _map_rows(path, np.float32, sum(widths.values()), len(ids))
    for begin in range(0, len(ids), BATCH_SIZE_PER_DUMP):
        part = slice(begin, begin + BATCH_SIZE_PER_DUMP)
        chosen = owns(np.asarray(ids[part]))
        read = {WEIGHT: torch.from_numpy(weights[part][chosen])}
        if states is not None:
            read |= zip(widths, torch.from_numpy(states[part][chosen]).split(list(widths.values()), dim=1), strict=True)
        own_scores = None if kept is None else torch.from_numpy(kept[part][chosen])
        yield torch.from_numpy(ids[part][chosen]), read, own_scores


def _load_candidates(scores: TableScores, folder: Path, owns: OwnsIds) -> None:
    known, columns = scores.view.candidates()
    counts = dict(zip(known.tolist(), columns["count"].tolist(), strict=True))
    keys, frequencies = (_file_paths(folder, scores.name, item) for item in ("counter_keys", "counter_frequencies"))
    for key_file, frequency_file in zip(keys, frequencies, strict=True):
        ids = _map_rows(key_file, np.int64, 1, None)[:, 0]
        found = _map_rows(frequency_file, np.int64, 1, len(ids))[:, 0]
        chosen = owns(np.asarray(ids))
        counts |= zip(ids[chosen].tolist(), found[chosen].tolist(), strict=True)
    candidates = torch.tensor(list(counts), dtype=torch.int64, device="cpu")
    new = ~scores.view.knows(candidates)
    given = torch.tensor(list(counts.values()), dtype=torch.int64, device="cpu")[new]
    scores.view.set_candidates(candidates[new], {"count": counts_of_dump(scores.name, given)})
