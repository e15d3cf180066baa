"""The report of a finished run: printed, written as JSON, and drawn."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from support.training import CacheStats, TrainResult, hit_rate


@dataclass(frozen=True)
class TableSize:
    """The number of rows of a table, and how many of them the device cache holds."""

    rows: int
    cache_rows: int


def table_sizes(tables: Iterable[BaseEmbeddingConfig], cache_rows: Mapping[str, int]) -> dict[str, TableSize]:
    """Returns the sizes of the tables of a collection, by name."""
    return {table.name: TableSize(table.num_embeddings, cache_rows[table.name]) for table in tables}


@dataclass(frozen=True)
class Report:
    """Results of a run with cached embedding tables and, with --baseline, of the same model with torch's tables."""

    data: str
    options: Mapping[str, Any]
    tables: Mapping[str, TableSize]
    cached: TrainResult
    plain: TrainResult | None = None

    @property
    def auc_difference(self) -> float | None:
        """The AUC with cached tables minus the AUC with plain tables."""
        plain = self.plain.test.auc if self.plain else None
        return None if plain is None or self.cached.test.auc is None else self.cached.test.auc - plain

    def print(self) -> None:
        """Prints a summary."""
        print(f"\n{self.data}")
        _print_result("cached tables", self.cached)
        if self.plain is not None:
            _print_result("plain tables", self.plain)
            print(f"AUC difference     {_number(self.auc_difference, '+.5f')}")
        _print_tables(self.tables)
        if self.cached.cache is not None:
            _print_cache(self.cached.cache)
        print(f"peak memory        {peak_memory_bytes() / 2**20:,.0f} MiB of the process")

    def write_json(self, path: Path) -> None:
        """Writes all results as JSON."""
        content = {
            "data": self.data,
            "options": {name: _plain_value(value) for name, value in self.options.items()},
            "tables": {name: asdict(table) for name, table in self.tables.items()},
            "cached": asdict(self.cached),
            "plain": asdict(self.plain) if self.plain else None,
            "auc_difference": self.auc_difference,
            "peak_memory_bytes": peak_memory_bytes(),
        }
        path.write_text(json.dumps(content, indent=2) + "\n")

    def draw(self, path: Path) -> None:
        """Draws loss, validation AUC and hit rate over the steps."""
        import matplotlib

        matplotlib.use("Agg")  # a backend that draws to a file without a display
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(3, 1, figsize=(8, 9), sharex=True, constrained_layout=True)
        results = {"cached": self.cached} | ({"plain": self.plain} if self.plain else {})
        for (name, result), style in zip(results.items(), ("-", "--"), strict=False):
            curves = result.curves
            axes[0].plot(curves.steps, curves.loss, style, label=name)
            auc = [float("nan") if value is None else value for value in curves.validation_auc]
            axes[1].plot(curves.evaluation_steps, auc, style, marker="o", label=name)
        axes[2].plot(self.cached.curves.steps, self.cached.curves.hit_rate)
        labels = ("training loss", "validation AUC", "cache hit rate\n(share of distinct rows)")
        for axis, label in zip(axes, labels, strict=True):
            axis.set_ylabel(label)
            axis.grid(alpha=0.3)
        axes[0].legend()
        axes[2].set_xlabel("step")
        axes[0].set_title(self.data)
        figure.savefig(path, dpi=120)
        pyplot.close(figure)


def peak_memory_bytes() -> int:
    """Returns the maximal resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def _number(value: float | None, form: str) -> str:
    return "n/a (only one kind of label)" if value is None else format(value, form)


def _plain_value(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _print_result(name: str, result: TrainResult) -> None:
    print(
        f"{name:18s} test AUC {_number(result.test.auc, '.4f')},"
        f" log loss {_number(result.test.log_loss, '.4f')}; {result.steps:,} steps in"
        f" {result.seconds:.1f} s, of which training {result.training_seconds:.1f} s ({result.samples_per_second:,.0f}"
        " samples/s)"
    )


def _print_tables(tables: Mapping[str, TableSize]) -> None:
    for name, table in tables.items():
        share = table.cache_rows / table.rows
        print(f"  table {name:12s} {table.rows:>9,} rows, {table.cache_rows:>9,} in the cache ({share:.0%})")


def _print_cache(stats: CacheStats) -> None:
    print(
        f"cache              {hit_rate(stats):.1%} hits: {stats['lookups']:,} lookups of"
        f" {stats['unique_rows']:,} distinct rows, {stats['unique_misses']:,} misses"
    )
    print(
        f"                   {stats['rows_in']:,} rows in ({stats['bytes_in'] / 2**20:.1f} MiB),"
        f" {stats['rows_out']:,} rows out ({stats['bytes_out'] / 2**20:.1f} MiB)"
    )
