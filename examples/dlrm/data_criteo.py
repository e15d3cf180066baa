"""Criteo display-advertising logs: a label, 13 counts and 26 categories on each line, TSV or CSV, gzip or not."""

from __future__ import annotations

import gzip
import io
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from support.clicks import ClickData, JaggedIds
from support.errors import InputError, open_problem
from support.hashing import hash_text
from torch import Tensor

LABEL = "label"
COUNTS = [f"I{number}" for number in range(1, 14)]
CATEGORIES = [f"C{number}" for number in range(1, 27)]
COLUMNS = [LABEL, *COUNTS, *CATEGORIES]


@contextmanager
def _open(path: Path) -> Iterator[TextIO]:
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"  # the first bytes of gzip; the name need not end in .gz
            file.seek(0)
            yield io.TextIOWrapper(gzip.GzipFile(fileobj=file) if zipped else file, encoding="utf-8")
    except OSError as error:
        raise open_problem(path, error) from error
    except (EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: not text, or a damaged gzip file ({error})") from error


def _column_indices(path: Path, first: list[str]) -> tuple[list[int], bool]:
    """Returns the index of each of COLUMNS in a line, and whether the first line is a header."""
    if LABEL in first:
        missing = [name for name in COLUMNS if name not in first]
        if missing:
            raise InputError(f"{path}: the header has no column {', '.join(missing)}")
        return [first.index(name) for name in COLUMNS], True
    if len(first) != len(COLUMNS):
        raise InputError(
            f"{path}: {len(first)} columns in line 1; without a header there must be {len(COLUMNS)}:"
            " label, 13 counts, 26 categories"
        )
    return list(range(len(COLUMNS))), False


def _rows(path: Path, file: TextIO) -> Iterator[tuple[int, list[str]]]:
    """Yields line numbers with the fields of the line in the order of COLUMNS."""
    first_line = file.readline().rstrip("\r\n")
    if not first_line:
        raise InputError(f"{path} is empty")
    separator = "\t" if "\t" in first_line else ","
    first = first_line.split(separator)
    places, is_header = _column_indices(path, first)
    if not is_header:
        yield 1, first
    for number, line in enumerate(file, start=2):
        fields = line.rstrip("\r\n").split(separator)
        if len(fields) != len(first):
            raise InputError(f"{path}, line {number}: {len(fields)} columns, not {len(first)}")
        yield number, [fields[place] for place in places]


class _Columns:
    """The lines read so far, stored compactly by column, because the full log has 45 million lines."""

    def __init__(self) -> None:
        self.labels = array("f")
        self.counts = array("f")
        self.ids = [array("q") for _ in CATEGORIES]
        self._known: list[dict[str, int]] = [{} for _ in CATEGORIES]

    def add(self, row: Sequence[str]) -> None:
        """Adds a line. Raises ValueError if a value is invalid; the message names the column."""
        if row[0] not in ("0", "1"):
            raise ValueError(f"label is {row[0]!r}, not 0 or 1")
        self.labels.append(float(row[0]))
        self.counts.extend(_number(name, text) for name, text in zip(COUNTS, row[1:14], strict=True))
        for column, text in enumerate(row[14:]):
            self.ids[column].append(self._hash(column, text))

    def _hash(self, column: int, text: str) -> int:
        """Returns the id of a category. A missing category also has an id, because its absence helps to predict the
        click.
        """
        known = self._known[column]
        if text not in known:
            known[text] = hash_text(CATEGORIES[column], text)
        return known[text]


def _number(name: str, text: str) -> float:
    try:
        return float(text) if text else 0.0
    except ValueError as error:
        raise ValueError(f"{name} is {text!r}, not a number") from error


def _tensor(numbers: array[float] | array[int]) -> Tensor:
    return torch.from_numpy(np.array(numbers))


def criteo_clicks(path: Path, samples: int | None = None) -> ClickData:
    """Reads the first `samples` lines of a Criteo file, or all of them."""
    columns = _Columns()
    with _open(path) as file:
        for number, row in islice(_rows(path, file), samples):
            try:
                columns.add(row)
            except ValueError as error:
                raise InputError(f"{path}, line {number}: {error}") from error
    counts = _tensor(columns.counts).view(-1, len(COUNTS))
    features = {name: JaggedIds.single(_tensor(ids)) for name, ids in zip(CATEGORIES, columns.ids, strict=True)}
    # Counts span many orders of magnitude, so the model uses their logarithms; the few negative counts become zero.
    return ClickData(counts.clamp(min=0).log1p(), features, _tensor(columns.labels))
