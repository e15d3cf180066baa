"""What a step looks up."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .ids import Distribution

LEARNING_RATE = 0.01
EPS = 1e-8
BETAS = (0.9, 0.999)
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")
_SUFFIXES = {"k": 1_000, "m": 1_000_000}


@dataclass(frozen=True)
class TableSet:
    """`count` tables of `rows` rows each."""

    count: int
    rows: int

    @classmethod
    def parse(cls, text: str) -> TableSet:
        """From `4x100k`, `1x4m`, `2x500`.

        Raises:
            argparse.ArgumentTypeError: another form; its message reaches the user.
        """
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)([km]?)", text.lower())
        if match is None:
            raise argparse.ArgumentTypeError(f"{text!r} is not COUNTxROWS, such as 4x100k or 1x4m")
        return cls(int(match.group(1)), int(match.group(2)) * _SUFFIXES.get(match.group(3), 1))

    @property
    def name(self) -> str:
        for suffix, factor in (("m", 1_000_000), ("k", 1_000)):
            if self.rows % factor == 0:
                return f"{self.count}x{self.rows // factor}{suffix}"
        return f"{self.count}x{self.rows}"


@dataclass(frozen=True)
class Workload:
    """The tables, and the shape of a batch.

    Attributes:
        tables: each has one feature.
        dim: D.
        pooled: bags of `bag` ids are summed; otherwise every lookup is an output row.
        optimizer: one of OPTIMIZERS; adam is torch.optim.SparseAdam.
        lookups: N, of all tables together.
        bag: ids of a sample in one feature.
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
    def output_rows(self) -> int:
        """Rows of D elements that leave the lookup, R."""
        return self.batch_size * self.tables.count if self.pooled else self.lookups

    @property
    def states(self) -> float:
        """Optimizer state per weight element."""
        return {"sgd": 0.0, "adagrad": 1.0, "rowwise_adagrad": 1.0 / self.dim, "adam": 2.0}[self.optimizer]

    @property
    def record_bytes(self) -> int:
        """Weight and states of one row, as ours lays them out."""
        return (round(4 * self.dim * (1 + self.states)) + 15) // 16 * 16

    @property
    def table_bytes(self) -> int:
        """Weights and states of all tables."""
        return self.tables.count * self.tables.rows * self.record_bytes

    @property
    def offsets(self) -> torch.Tensor:
        """Bags of all features, int64 `[F * B + 1]`."""
        return torch.arange(0, self.tables.count * self.per_table + 1, self.bag)

    def describe(self) -> dict[str, Any]:
        return {
            "tables": self.tables.name,
            "table_count": self.tables.count,
            "rows": self.tables.rows,
            "dim": self.dim,
            "form": "pooled" if self.pooled else "sequence",
            "optimizer": self.optimizer,
            "lookups": self.lookups,
            "bag": self.bag,
        }

    def draw(self, distribution: Distribution, rng: np.random.Generator) -> torch.Tensor:
        """The ids of one batch, int64 `[tables, lookups per table]`."""
        tables = range(self.tables.count)
        ids = [distribution.draw(rng, self.tables.rows, self.per_table, table) for table in tables]
        return torch.from_numpy(np.stack(ids))

    def gradient(self, seed: int) -> torch.Tensor:
        """Gradient of the output: `[N, D]`, or `[B, tables * D]` when pooled.

        Small multiples of 1/16: their sums are exact in any order, so that a difference between two
        contenders is a fault and not the order of a sum.
        """
        width = self.tables.count * self.dim if self.pooled else self.dim
        rows = self.batch_size if self.pooled else self.lookups
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(-8, 9, (rows, width), generator=generator).float() / 16


def make_workload(tables: TableSet, dim: int, pooled: bool, optimizer: str, lookups: int, bag: int) -> Workload:
    """A workload of about `lookups` lookups: half of them from D = 128 on, and whole bags."""
    wanted = lookups if dim < 128 else lookups // 2
    unit = tables.count * bag
    return Workload(tables, dim, pooled, optimizer, max(unit, wanted // unit * unit), bag)
