"""Prints and plots the simulated caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from .advice import Table
from .costs import Bandwidth


def _format_memory(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


def report_lines(tables: Sequence[Table], bandwidth: Bandwidth) -> Iterator[str]:
    """Yields the report's lines: for each table and cache size the memory, miss rates, and the first policy's time."""
    for table in tables:
        policies = list(table.counts)
        some = table.counts[policies[0]][0]
        new = some.new / some.rows if some.rows else 0.0
        yield (
            f"table {table.name}: {table.lookups} lookups in {some.batches} batches, {table.distinct} distinct ids, at "
            f"most {table.largest} in a batch; {new:.1%} of the rows of batches are new: a miss in any cache"
        )
        heads = [f"{policy:>11}" for policy in policies]
        yield f"{'rows':>12}{'share':>8}{'memory':>13}{''.join(heads)}{'swap, ' + policies[0]:>20}"
        for position, rows in enumerate(table.sizes):
            rates = [f"{table.counts[policy][position].miss_rate:>11.1%}" for policy in policies]
            seconds = bandwidth.seconds(table.counts[policies[0]][position], table.record_bytes)
            memory = _format_memory(rows * table.record_bytes)
            yield f"{rows:>12}{rows / table.distinct:>8.1%}{memory:>13}{''.join(rates)}{f'{1e3 * seconds:.3f} ms':>20}"
        yield ""
    copies = f"{bandwidth.to_device / 1e9:.2f} GB/s to the device, {bandwidth.to_host / 1e9:.2f} GB/s back"
    yield "Columns of policies: the miss rate, that is the fraction of known (not new) rows that were not in the cache."
    yield f"Times are modelled, not measured: bytes of a batch's swaps at {copies} ({bandwidth.source})."


def draw_miss_rates(tables: Sequence[Table], path: Path) -> None:
    """Plots miss rate against cache size for each table and policy.

    Raises:
        ImportError: matplotlib is not installed.
        OSError, ValueError: the file cannot be written, or its suffix is not an image format.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--plot needs the package matplotlib: pip install 'rec_sdk_torch[plot]'") from error
    figure = Figure(figsize=(6.4, 3.2 * len(tables)), layout="constrained")
    FigureCanvasAgg(figure)
    for position, table in enumerate(tables, start=1):
        axes = figure.add_subplot(len(tables), 1, position)
        for policy, counts in table.counts.items():
            axes.plot(table.sizes, [each.miss_rate for each in counts], marker="o", markersize=3, label=policy)
        axes.set(title=table.name, xlabel="rows of the cache", ylabel="known rows that miss", xscale="log", ylim=(0, 1))
        axes.legend()
    figure.savefig(path, dpi=150)
