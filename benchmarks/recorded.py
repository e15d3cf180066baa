"""Writes the tables of recorded.json into pages of docs: python -m benchmarks.recorded."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "recorded.json"
DOCS = Path(__file__).parents[1] / "docs"
PAGES = tuple(DOCS / f"{name}.md" for name in ("performance", "new_rows_performance", "modelled_performance"))
Table = dict[str, Any]
"""A table: `command`, `processor` and `date` of its run, `columns`, and `rows` with one text for each column."""


def line_of(cells: list[str]) -> str:
    """Returns one line of a Markdown table."""
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|\n"


def shown(table: Table) -> str:
    """Returns a table in Markdown, with the line below it that names date, processor and command."""
    rule = "|" + "---|" * len(table["columns"]) + "\n"
    rows = "".join(map(line_of, table["rows"]))
    below = f"Recorded {table['date']}, {table['processor']}: `{table['command']}`."
    return f"{line_of(table['columns'])}{rule}{rows}\n{below}\n"


def pages(texts: Sequence[str]) -> list[str]:
    """Returns the texts of the pages with each table of the file written after its mark, which one page has."""
    written = list(texts)
    for name, table in json.loads(FILE.read_text()).items():
        (number,) = (number for number, text in enumerate(written) if f"<!-- {name} -->\n" in text)
        before, mark, rest = written[number].partition(f"<!-- {name} -->\n")
        below = re.split(r"^Recorded .*\n", rest, maxsplit=1, flags=re.MULTILINE)[1]
        written[number] = before + mark + shown(table) + below
    return written


if __name__ == "__main__":
    for page, text in zip(PAGES, pages([page.read_text() for page in PAGES]), strict=True):
        page.write_text(text)
