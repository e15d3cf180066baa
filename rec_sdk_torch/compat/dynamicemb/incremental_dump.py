"""`get_score`, `set_score` and `incremental_dump` for whole models."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from .dump_load import dynamic_tables, warn_of_unknown

Scores = dict[str, dict[str, int]]
"""A score or threshold for each table, by the path of its collection and the table's name."""
Rows = dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]]
"""Ids and weights of each table, by the path of its collection and the table's name."""


def get_score(model: torch.nn.Module) -> Scores | None:
    """Returns the score of the next batch in each table, which may be the threshold of a later incremental dump.

    Returns None if the model has no dynamic tables.
    """
    found = dynamic_tables(model, "there are no scores")
    return {path: tables.get_score() for path, _, tables in found} or None


def set_score(model: torch.nn.Module, table_score: int | Mapping[str, Mapping[str, int]]) -> None:
    """Sets the score of later batches.

    Args:
        model: model with tables whose scores are CUSTOMIZED.
        table_score: one score for all tables, or scores by collection (name or path) and table name.

    Raises:
        ValueError: a score is not a positive integer, or a table's scores are not CUSTOMIZED.
    """
    _check_numbers("table_score", table_score)
    found = dynamic_tables(model, "no score is set")
    if isinstance(table_score, Mapping):
        warn_of_unknown(table_score, {each for path, name, _ in found for each in (path, name)})
    for path, name, tables in found:
        if isinstance(table_score, int):
            tables.set_score(dict.fromkeys(tables.table_names, table_score))
            continue
        own = table_score.get(name, table_score.get(path, {}))
        warn_of_unknown(own, set(tables.table_names))
        tables.set_score({table: score for table, score in own.items() if table in tables.table_names})


def incremental_dump(
    model: torch.nn.Module, score_threshold: int | Mapping[str, Mapping[str, int]], pg: dist.ProcessGroup | None = None
) -> tuple[Rows, Scores] | None:
    """Returns the rows whose scores are at least the threshold.

    Args:
        model: model with dynamic tables.
        score_threshold: one threshold for all tables, or thresholds by collection path and table name. Tables without
            a threshold are not dumped.
        pg: process group whose rows are gathered; None for this rank's rows only.

    Returns:
        Ids int64 `[n]` and weights `[n, D]` in host memory, and the thresholds for the next incremental dump; None if
        the model has no dynamic tables.

    Raises:
        ValueError: a threshold is not an integer.
    """
    _check_numbers("score_threshold", score_threshold)
    found = dynamic_tables(model, "nothing is dumped")
    if isinstance(score_threshold, Mapping):
        warn_of_unknown(score_threshold, {path for path, _, _ in found})
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


def _check_numbers(name: str, value: object) -> None:
    numbers = [value]
    if isinstance(value, Mapping) and all(isinstance(of_tables, Mapping) for of_tables in value.values()):
        numbers = [number for of_tables in value.values() for number in of_tables.values()]
    if any(isinstance(number, bool) or not isinstance(number, int) for number in numbers):
        raise ValueError(f"{name} is {value!r}, expected an int, or one by collection and table")
