"""The HTML overview of a module's tables that notebooks display."""

from __future__ import annotations

from html import escape

from ..rows.layout import Layout
from ..rows.table_view import TableView
from .monitor import Monitor, memory_report

_COLUMNS = ("table", "rows", "of", "columns", "in the cache", "hit rate", "device MiB", "host MiB")


def tables_html(title: str, layout: Layout, monitor: Monitor) -> str:
    """Returns an HTML table with one line for each embedding table; allocates nothing.

    Column `rows` is the present number of rows, and column `of` is `num_embeddings`. Cells without a value show "-".
    """
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    lines = "".join(_table_row(layout, monitor, table.name) for table in layout.tables)
    return (
        f"<table><caption>{escape(title)} on {escape(str(layout.device))}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
    )


def _table_row(layout: Layout, monitor: Monitor, name: str) -> str:
    table = layout.config(name)
    slots = {member.config.name: member.slots for group in layout.built for member in group.members}
    stats, memory = monitor.cache_stats(layout.built, name), memory_report(layout.built, name)
    looked_up = stats["unique_rows"]
    cells = [
        f"{TableView(layout, name).count():,}" if name in slots else "-",
        f"{table.num_embeddings:,}",
        str(table.embedding_dim),
        f"{slots[name]:,}" if name in slots else "-",
        f"{1 - stats['unique_misses'] / looked_up:.1%}" if looked_up else "-",
        *(f"{memory[kind] / 2**20:.2f}" for kind in ("device", "host")),
    ]
    return f"<tr><th>{escape(name)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
