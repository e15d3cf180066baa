"""Workloads of the step benchmarks: tables, shapes of batches, ids and gradients."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rec_sdk_torch.formulas import FORMULAS

from .ids import Distribution

LEARNING_RATE = 0.01
EPS = 1e-8
BETAS = (0.9, 0.999)
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")
"""Optimizers that the rivals also have, one for each form of a record."""
FORMS = ("sequence", "pooled")
_SUFFIXES = {"k": 1_000, "m": 1_000_000}

CRITEO_SIZES = (
    *(1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194),
    *(27, 14_992, 5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
)
"""Numbers of distinct values of the 26 categorical features of the Criteo Kaggle data, as DLRM's script counts them."""
CRITEO_CAP = 400_000


def _number(digits: str, suffix: str) -> int:
    return int(digits) * _SUFFIXES.get(suffix, 1)


def _short(rows: int) -> str:
    for suffix, factor in (("m", 1_000_000), ("k", 1_000)):
        if rows % factor == 0:
            return f"{rows // factor}{suffix}"
    return str(rows)


@dataclass(frozen=True)
class TableSet:
    """`count` tables of `rows` rows each; or Criteo's 26 tables with mixed dims, of at most `rows` rows."""

    count: int
    rows: int
    criteo: bool = False

    @classmethod
    def parse(cls, text: str) -> TableSet:
        """Parses `4x100k`, `1x4m` or `2x500`; also `criteo`, or `criteo@20k`, which limits each table to 20,000 rows.

        Raises:
            argparse.ArgumentTypeError: the text has another form. argparse shows the message to the user.
        """
        mixed = re.fullmatch(r"criteo(?:@([1-9]\d*)([km]?))?", text.lower())
        if mixed is not None:
            cap = _number(mixed.group(1), mixed.group(2)) if mixed.group(1) else CRITEO_CAP
            return cls(len(CRITEO_SIZES), cap, criteo=True)
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)([km]?)", text.lower())
        if match is None:
            raise argparse.ArgumentTypeError(f"{text!r} is not COUNTxROWS, such as 4x100k or 1x4m, nor criteo")
        return cls(int(match.group(1)), _number(match.group(2), match.group(3)))

    @property
    def name(self) -> str:
        if self.criteo:
            return "criteo" if self.rows == CRITEO_CAP else f"criteo@{_short(self.rows)}"
        return f"{self.count}x{_short(self.rows)}"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of rows of each table."""
        if self.criteo:
            return tuple(min(size, self.rows) for size in CRITEO_SIZES)
        return (self.rows,) * self.count

    def dims(self, dim: int) -> tuple[int, ...]:
        """Returns D of each table; Criteo's tables have D / 2 below 100 thousand rows, and D / 4 below 1,000."""
        if not self.criteo:
            return (dim,) * self.count
        wanted = [dim if size >= 100_000 else dim // 2 if size >= 1_000 else dim // 4 for size in CRITEO_SIZES]
        return tuple(max(4, width // 4 * 4) for width in wanted)


@dataclass(frozen=True)
class Workload:
    """The tables, and the shape of a batch.

    Attributes:
        tables: the tables; each has one feature.
        dim: D, the largest if they differ.
        pooled: whether bags of `bag` ids are summed; otherwise every lookup is an output row.
        optimizer: one of OPTIMIZERS; adam is torch.optim.SparseAdam.
        lookups: N, the number of lookups of a batch over all tables.
        bag: ids per sample and feature.
    """

    tables: TableSet
    dim: int
    pooled: bool
    optimizer: str
    lookups: int
    bag: int

    @property
    def batch_size(self) -> int:
        return self.lookups // (self.tables.count * self.bag)

    @property
    def per_table(self) -> int:
        return self.batch_size * self.bag

    @property
    def dims(self) -> tuple[int, ...]:
        """D of each table."""
        return self.tables.dims(self.dim)

    @property
    def output_elements(self) -> int:
        """Elements of the lookup's output: N * D, or B * the dims of all tables when pooled."""
        return self.batch_size * sum(self.dims) if self.pooled else self.lookups * self.dim

    @property
    def states(self) -> float:
        """Number of optimizer state values per weight element."""
        return self.states_of(self.dim)

    def states_of(self, dim: int) -> float:
        """Returns the number of optimizer state values per weight element of a table with `dim` columns."""
        return sum(FORMULAS[self.optimizer].state_elements(dim)) / dim

    @property
    def record_bytes(self) -> int:
        """Bytes of weight and states of one row, in our layout."""
        return self.record_bytes_of(self.dim)

    def record_bytes_of(self, dim: int) -> int:
        """Returns the bytes of weight and states of one row with `dim`, in our layout."""
        return (round(4 * dim * (1 + self.states_of(dim))) + 15) // 16 * 16

    @property
    def table_bytes(self) -> int:
        """Bytes of weights and states of all tables."""
        pairs = zip(self.tables.sizes, self.dims, strict=True)
        return sum(rows * self.record_bytes_of(dim) for rows, dim in pairs)

    @property
    def lengths(self) -> torch.Tensor:
        """Lengths of the bags of all features, int64 `[F * B]`."""
        return torch.full((self.tables.count * self.batch_size,), self.bag)

    @property
    def offsets(self) -> torch.Tensor:
        """Offsets of the bags of all features, int64 `[F * B + 1]`."""
        return torch.arange(0, self.tables.count * self.per_table + 1, self.bag)

    def describe(self) -> dict[str, Any]:
        return {
            "tables": self.tables.name,
            "table_count": self.tables.count,
            "rows": self.tables.rows,
            "rows_of_tables": list(self.tables.sizes),
            "dim": self.dim,
            "dims_of_tables": list(self.dims),
            "form": "pooled" if self.pooled else "sequence",
            "optimizer": self.optimizer,
            "lookups": self.lookups,
            "bag": self.bag,
        }

    def draw(self, distribution: Distribution, rng: np.random.Generator) -> torch.Tensor:
        """Draws the ids of one batch, int64 `[tables, lookups per table]`."""
        sizes = enumerate(self.tables.sizes)
        ids = [distribution.draw(rng, rows, self.per_table, table) for table, rows in sizes]
        return torch.from_numpy(np.stack(ids))

    def gradient(self, seed: int) -> torch.Tensor:
        """Returns the gradient of the output: `[N, D]`, or `[B, dims of all tables]` when pooled.

        Values are small multiples of 1/16, so their sums are exact in any order. A difference between two contenders is
        therefore a fault, and not caused by the order of a sum.
        """
        width = sum(self.dims) if self.pooled else self.dim
        rows = self.batch_size if self.pooled else self.lookups
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(-8, 9, (rows, width), generator=generator).float() / 16

    def by_feature(self, output: torch.Tensor) -> list[torch.Tensor]:
        """Splits an output or its gradient into one tensor per feature, each with its own memory, like a model's
        gradients.
        """
        if self.tables.count == 1:
            return [output]
        parts = output.split(list(self.dims), dim=1) if self.pooled else output.split(self.per_table)
        return [part.clone(memory_format=torch.contiguous_format) for part in parts]


def make_workload(tables: TableSet, dim: int, pooled: bool, optimizer: str, lookups: int, bag: int) -> Workload:
    """Builds a workload of about `lookups` lookups, rounded to whole bags, or half as many if D is at least 128.

    Criteo's tables have bags of one id.

    Raises:
        ValueError: a sequence was requested from Criteo's tables, whose dims differ.
    """
    if tables.criteo and not pooled:
        raise ValueError(f"{tables.name}: a sequence needs tables of one dim")
    bag = 1 if tables.criteo else bag
    wanted = lookups if dim < 128 else lookups // 2
    unit = tables.count * bag
    return Workload(tables, dim, pooled, optimizer, max(unit, wanted // unit * unit), bag)
