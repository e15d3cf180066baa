"""Replicated (data-parallel) tables: every rank has all rows, and training sends ids and gradients to all ranks."""

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
    """Raises an error if the initial rows of a replicated table would differ between ranks.

    Raises:
        ValueError: a replicated hash table has an `init_fn`.
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


def table_checksums(view: TableView) -> dict[str, str]:
    """Returns checksums of a table's ids and of each part of its rows, by part name, as hexadecimal text."""
    sums: dict[str, int] = {}
    for chunk in view.chunks(kept=True):
        for name, tensor in {"ids": chunk.ids, **chunk.parts}.items():
            sums[name] = checksum(tensor, sums.get(name, 0))
    return {name: f"{number:08x}" for name, number in sums.items()}


def checksum(tensor: torch.Tensor, start: int = 0) -> int:
    """Returns a 32-bit checksum of a host tensor; `start` is the checksum of the data before it."""
    return zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().tobytes(), start)


@dataclass(frozen=True)
class Route:
    """Counts and indices of one exchange of rows of one embedding dim, and of their gradients.

    Attributes:
        rows_to, rows_from: number of rows to and from each rank; int `[W]`.
        grads_to, grads_from: number of gradients to and from each rank; int `[W]`.
        sent_rows: int64, indices of the local rows to send; None: all, in order.
        grad_rows: int64, for each gradient to send, ordered by destination rank, the index of the received row that it
            belongs to; None: all, in order.
        relayed, grads_relayed: numbers of rows and gradients that this rank forwards in a hierarchical all-to-all.
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
    """The replicated tables of a collection, and the additional exchanges that they require from this rank.

    Without these exchanges, this rank would send ids of such a table only to itself, because it owns all of its rows.

    Attributes:
        any: whether there are replicated tables.
    """

    def __init__(self, placements: Sequence[Placement], rank: int) -> None:
        self._tables = np.array([placement.replicated for placement in placements], bool)
        self._rank, self.any = rank, bool(self._tables.any())

    def counts_for_all(self, counts: Int64Array) -> Int64Array:
        """Returns how many ids to send to each rank, int64 `[W, T]`, if ids of replicated tables are sent to all ranks.

        `counts`, int64 `[W, T]`, are the numbers of ids by owner rank.
        """
        return np.where(self._tables, counts[self._rank], counts)

    def replication_indices(self, counts: Int64Array, tables: Sequence[int]) -> Int64Array:
        """Returns indices into an array, int64 `[n]`, that repeat the elements of replicated tables for every rank.

        Args:
            counts: int64 `[W, T]`, number of the array's elements for each rank and table.
            tables: indices of the tables in the array, whose elements are ordered by rank, then by table.
        """
        own = counts[:, tables]
        begins: Int64Array = np.reshape(np.cumsum(own) - own.ravel(), own.shape)
        here = self._tables[tables]
        lengths = np.where(here, own[self._rank], own).ravel()
        shifts = np.where(here, begins[self._rank], begins).ravel() - (np.cumsum(lengths) - lengths)
        return np.repeat(shifts, lengths) + np.arange(lengths.sum())

    def route(
        self,
        base: Route,
        sent: Int64Array,
        received: Int64Array,
        relayed: Relayed,
        tables: Sequence[int],
        device: torch.device,
    ) -> Route:
        """Returns the counts and indices with which the rows of a training batch are exchanged.

        Rows of replicated tables are not sent to other ranks, but their gradients are sent to all ranks.

        Args:
            base: the route that is right without replicated tables.
            sent: int64 `[W, T]`, number of distinct ids of this rank by owner rank.
            received: int64 `[W, T]`, number of received ids by sending rank.
            relayed: int64 `[L, W / L, T]`, number of ids that this rank forwarded; None with a flat all-to-all.
            tables: indices of the tables of one embedding dim.
            device: device of the rows.
        """
        replicated, received_counts = self._tables[tables], received[:, tables]
        if not replicated.any():
            return base
        needed = np.broadcast_to(
            ~replicated, received_counts.shape
        ).copy()  # True where a rank must be sent the rows of a table
        needed[self._rank] = True
        sent_rows = np.flatnonzero(np.repeat(needed.ravel(), received_counts.ravel()))
        rows_to = np.where(replicated, 0, received_counts)
        rows_to[self._rank] = received_counts[self._rank]
        return replace(
            base,
            rows_to=rows_to.sum(axis=1).tolist(),
            grads_to=self.counts_for_all(sent)[:, tables].sum(axis=1).tolist(),
            sent_rows=torch.from_numpy(sent_rows).to(device),
            grad_rows=torch.from_numpy(self.replication_indices(sent, tables)).to(device),
            relayed=None if relayed is None else self._forwarded_rows(relayed[:, :, tables], replicated),
        )

    def _forwarded_rows(self, relayed: Int64Array, replicated: np.ndarray) -> Int64Array:
        """Returns the number of rows that this rank forwards; rows of replicated tables are not sent to other ranks."""
        rows = np.where(replicated, 0, relayed)
        machine, local_rank = divmod(self._rank, len(relayed))
        rows[local_rank, machine] = relayed[local_rank, machine]
        result: Int64Array = rows.sum(axis=2)
        return result
