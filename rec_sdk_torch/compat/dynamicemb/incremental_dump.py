"""`get_score`, `set_score` and `incremental_dump` of whole models."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from ...runtime.warn import InputWarning, warn
from .dump_load import dynamic_tables

Scores = dict[str, dict[str, int]]
"""A number of each table, by the path of its collection and its name."""
Rows = dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]]
"""Ids and weights of each table, by the path of its collection and its name."""


def get_score(model: torch.nn.Module) -> Scores | None:
    """The score that the next batch has in each table: a threshold for a later increment. None without such tables."""
    found = dynamic_tables(model, "there are no scores")
    return {path: tables.get_score() for path, _, tables in found} or None


def set_score(model: torch.nn.Module, table_score: int | Mapping[str, Mapping[str, int]]) -> None:
    """Sets the score of the batches to come.

    Args:
        model: has tables whose scores are CUSTOMIZED.
        table_score: of all tables, or by the name (or path) of their collection and theirs.

    Raises:
        ValueError: no whole number above 0, or a table whose scores are not CUSTOMIZED.
    """
    _check("table_score", table_score)
    found = dynamic_tables(model, "no score is set")
    if isinstance(table_score, Mapping):
        _warn_of_unknown(table_score, {each for path, name, _ in found for each in (path, name)})
    for path, name, tables in found:
        if isinstance(table_score, int):
            tables.set_score(dict.fromkeys(tables.table_names, table_score))
            continue
        own = table_score.get(name, table_score.get(path, {}))
        _warn_of_unknown(own, set(tables.table_names))
        tables.set_score({table: score for table, score in own.items() if table in tables.table_names})


def incremental_dump(
    model: torch.nn.Module, score_threshold: int | Mapping[str, Mapping[str, int]], pg: dist.ProcessGroup | None = None
) -> tuple[Rows, Scores] | None:
    """Rows whose scores are at least the given ones.

    Args:
        model: has dynamic tables.
        score_threshold: of all tables, or by the path of their collection and their name: the tables that are wanted.
        pg: ranks whose rows are gathered; None for those of this rank.

    Returns:
        ids int64 `[n]` and weights `[n, D]` on the host, and the thresholds of the next increment; None without
        dynamic tables.

    Raises:
        ValueError: a threshold that is not a whole number.
    """
    _check("score_threshold", score_threshold)
    found = dynamic_tables(model, "nothing is dumped")
    if isinstance(score_threshold, Mapping):
        _warn_of_unknown(score_threshold, {path for path, _, _ in found})
    rows: Rows = {}
    scores: Scores = {}
    for path, _, tables in found:
        if isinstance(score_threshold, Mapping):
            if path not in score_threshold:
                continue
            thresholds = dict(score_threshold[path])
        else:
            thresholds = dict.fromkeys(tables.table_names, score_threshold)
        rows[path], scores[path] = tables.incremental_dump(thresholds, pg)
    return (rows, scores) if found else None


def _check(name: str, given: object) -> None:
    numbers = [given]
    if isinstance(given, Mapping) and all(isinstance(of_tables, Mapping) for of_tables in given.values()):
        numbers = [number for of_tables in given.values() for number in of_tables.values()]
    if any(isinstance(number, bool) or not isinstance(number, int) for number in numbers):
        raise ValueError(f"{name} is {given!r}, expected an int, or one by collection and table")


def _warn_of_unknown(given: Mapping[str, object], known: set[str]) -> None:
    unknown = sorted(given.keys() - known)
    if unknown:
        warn(f"there are no {unknown}, only {sorted(known)}", InputWarning)
