"""Tables that every rank has as a whole: a training batch tells all ranks of its ids, and of their gradients."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..tbe import Int64Array, TableConfig, TableView
from .all_to_all import Relayed
from .placement import Placement


def check_replicas(tables: Sequence[TableConfig], placements: Sequence[Placement]) -> None:
    """
    Raises:
        ValueError: a table that cannot be the same on all ranks is to be on each of them.
    """
    drawn = [
        table.name
        for table, placement in zip(tables, placements, strict=True)
        if placement.replicated and table.hashed and table.init_fn is not None
    ]
    if drawn:
        raise ValueError(
            f"hash tables {drawn} have an init_fn, by which each rank draws other rows, so that they cannot be "
            "data_parallel: give the planner ParameterConstraints(sharding_types=['row_wise', 'table_wise']) for them"
        )


def checksums(view: TableView) -> dict[str, str]:
    """A checksum of the rows of a table, for its ids and each part of them."""
    sums: dict[str, int] = {}
    for chunk in view.chunks(kept=True):
        for name, tensor in {"ids": chunk.ids, **chunk.parts}.items():
            sums[name] = checksum(tensor, sums.get(name, 0))
    return {name: f"{number:08x}" for name, number in sums.items()}


def checksum(tensor: torch.Tensor, start: int = 0) -> int:
    """A checksum of 32 bits of a tensor in host memory, which goes on from `start`."""
    return zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().tobytes(), start)


@dataclass(frozen=True)
class Route:
    """The rows of one dim, from the ranks that have them to those that asked, and their gradients back.

    Attributes:
        rows_to, rows_from: rows for each rank, and of each rank; int `[W]`.
        grads_to, grads_from: gradients for each rank, and of each rank; int `[W]`.
        sent_rows: int64, those of the rows here that some rank waits for; None: all.
        grad_rows: int64, the received row that each gradient is of, by destination rank; None: all, in order.
        relayed, grads_relayed: rows and gradients that this rank passes on, by two levels.
    """

    rows_to: list[int]
    rows_from: list[int]
    grads_to: list[int]
    grads_from: list[int]
    sent_rows: torch.Tensor | None = None
    grad_rows: torch.Tensor | None = None
    relayed: Relayed = None
    grads_relayed: Relayed = None


class Replicas:
    """The replicated tables of a collection, as one rank sees them.

    By themselves its ids of such a table go to itself alone, where their rows are.

    Attributes:
        any: whether there is one.
    """

    def __init__(self, placements: Sequence[Placement], rank: int) -> None:
        self._tables = np.array([placement.replicated for placement in placements], bool)
        self._rank, self.any = rank, bool(self._tables.any())

    def counts_for_all(self, counts: Int64Array) -> Int64Array:
        """Ids for each rank, int64 `[W, T]`, from those that it has rows for, `counts`."""
        return np.where(self._tables, counts[self._rank], counts)

    def expand(self, counts: Int64Array, tables: Sequence[int]) -> Int64Array:
        """Returns where each element of the expanded array is in the array with `counts` elements, int64 `[n]`.

        `counts`: int64 `[W, T]`; the arrays have those of `tables`, rank by rank.
        """
        own = counts[:, tables]
        begins: Int64Array = np.reshape(np.cumsum(own) - own.ravel(), own.shape)
        here = self._tables[tables]
        lengths = np.where(here, own[self._rank], own).ravel()
        shifts = np.where(here, begins[self._rank], begins).ravel() - (np.cumsum(lengths) - lengths)
        return np.repeat(shifts, lengths) + np.arange(lengths.sum())

    def route(
        self,
        plain: Route,
        sent: Int64Array,
        asked: Int64Array,
        relayed: Relayed,
        tables: Sequence[int],
        device: torch.device,
    ) -> Route:
        """Returns the route of a training batch: rows of replicas stay where they are, their gradients go to all ranks.

        Args:
            plain: the route of rows that have one owner.
            sent: int64 `[W, T]`, the ids that this rank wants rows of.
            asked: int64 `[W, T]`, those that it was told of.
            relayed: int64 `[L, W / L, T]`, those that it passed on.
            tables: whose rows have one dim.
            device: of the rows.
        """
        here, of_all = self._tables[tables], asked[:, tables]
        if not here.any():
            return plain
        wanted = np.broadcast_to(~here, of_all.shape).copy()  # whether each rank waits for the rows of each table
        wanted[self._rank] = True
        sent_rows = np.flatnonzero(np.repeat(wanted.ravel(), of_all.ravel()))
        rows_to = np.where(here, 0, of_all)
        rows_to[self._rank] = of_all[self._rank]
        return replace(
            plain,
            rows_to=rows_to.sum(axis=1).tolist(),
            grads_to=self.counts_for_all(sent)[:, tables].sum(axis=1).tolist(),
            sent_rows=torch.from_numpy(sent_rows).to(device),
            grad_rows=torch.from_numpy(self.expand(sent, tables)).to(device),
            relayed=None if relayed is None else self._rows_only(relayed[:, :, tables], here),
        )

    def _rows_only(self, relayed: Int64Array, here: np.ndarray) -> Int64Array:
        """The rows that this rank passes on, of as many ids: those of replicated tables stay where they are."""
        rows = np.where(here, 0, relayed)
        machine, place = divmod(self._rank, len(relayed))
        rows[place, machine] = relayed[place, machine]
        result: Int64Array = rows.sum(axis=2)
        return result
