"""Writes the figures of recorded.json, one table a line, into docs/performance.md: python -m benchmarks.recorded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "recorded.json"
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
Table = dict[str, Any]
"""`command` and `processor` of a run, the `date` of its figures in the page, `columns`, and `rows` of as many texts."""


def line_of(cells: list[str]) -> str:
    """Returns a line of a table in Markdown."""
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|\n"


def shown(table: Table) -> str:
    """Returns a table as the page has it, and the line below."""
    rule = "|" + "---|" * len(table["columns"]) + "\n"
    rows = "".join(map(line_of, table["rows"]))
    below = f"Recorded {table['date']}, {table['processor']}: `{table['command']}`."
    return f"{line_of(table['columns'])}{rule}{rows}\n{below}\n"


def page(text: str) -> str:
    """Returns the text of the page with every table of the file in its place."""
    for name, table in json.loads(FILE.read_text()).items():
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        assert mark, f"docs/performance.md has no place for {name}"
        text = before + mark + shown(table) + re.split(r"^Recorded .*\n", rest, maxsplit=1, flags=re.MULTILINE)[1]
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
