"""Gradients of tables that are handed out and not applied: of those whose optimizer is SparseGradients."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import NamedTuple

import torch

from ..cache.device_cache import Group
from ..cache.ledger import Ledger, Run
from .layout import Layout
from .row_parts import WEIGHT
from .table_view import TableView


class TableGradient(NamedTuple):
    """The gradient of some rows of a table.

    Attributes:
        ids: int64 `[n]`, each once, or row numbers of an index table; on the host.
        rows: float32 `[n, D]`, on the device of the cache.
    """

    ids: torch.Tensor
    rows: torch.Tensor

    def sparse(self, num_rows: int) -> torch.Tensor:
        """A sparse COO tensor `[num_rows, D]`, as torch.nn.Embedding(sparse=True) has it; ids are below num_rows."""
        order = torch.argsort(self.ids)
        shape = (num_rows, self.rows.shape[1])
        ids, rows = self.ids[order].to(self.rows.device), self.rows[order.to(self.rows.device)]
        return torch.sparse_coo_tensor(
            ids[None], rows, shape, device=rows.device, is_coalesced=True, check_invariants=True
        )


def take_gradients(layout: Layout) -> dict[str, TableGradient]:
    """The gradients aggregated since the last call, by table; a table without lookups since then has `n` = 0.

    Raises:
        RuntimeError: no table has the optimizer SparseGradients.
    """
    taken: dict[str, TableGradient] = {}
    with layout.locks.exclusive():
        for group in layout.groups:
            if group.optimizers and group.optimizers[0].spec.hands_out:
                taken |= _taken(group)
    if not taken:
        raise RuntimeError("no table hands out its gradients: apply the optimizer SparseGradients first")
    return taken


def add_to_rows(layout: Layout, table: str, ids: torch.Tensor, change: torch.Tensor) -> None:
    """Adds `change` `[n, D]` to the weights of the rows of `ids`, int64 `[n]`, each once; 16-bit weights round once.

    Raises:
        KeyError: an id is no row of the table, or there is no such table; nothing was changed.
        ValueError: shapes that do not fit, or an id that is there twice.
    """
    if len(ids.unique()) != len(ids):
        raise ValueError(f"table {table!r}: {len(ids) - len(ids.unique())} ids are there twice")
    with layout.locks.exclusive():
        view = TableView(layout, table)
        unknown = ids.cpu()[~view.knows(ids)]
        if len(unknown):
            raise KeyError(f"table {table!r}: {len(unknown)} ids have no row (such as {int(unknown[0])})")
        weight = view.read(ids, [WEIGHT]).parts[WEIGHT]
        if change.shape != weight.shape:
            raise ValueError(f"table {table!r}: change has shape {tuple(change.shape)}, expected {tuple(weight.shape)}")
        view.write(ids, {WEIGHT: (weight.float() + change.detach().cpu()).to(weight.dtype)})


def _taken(group: Group) -> dict[str, TableGradient]:
    window = group.window
    assert window is not None
    group.swap.settle()
    ids = [torch.from_numpy(group.engine.window_ids(table).copy()) for table in range(len(group.members))]
    pieces: list[list[torch.Tensor]] = [[] for _ in group.members]

    def collect(
        key: Hashable,
        run: Run,
        cache: torch.Tensor,
        sums: torch.Tensor,
        slots: torch.Tensor,
        row_ids: torch.Tensor | None,
        tables: torch.Tensor,
        segments: torch.Tensor,
    ) -> None:
        picked = sums.index_select(0, slots.long())
        rows = picked[:, : group.layout.dim] + picked[:, group.layout.dim :]
        for piece, (begin, end) in zip(pieces, itertools.pairwise(tables.tolist()), strict=True):
            piece.append(rows[begin:end])

    window.close(group.swap.cache, collect, Ledger())
    empty = torch.empty((0, group.layout.dim), dtype=torch.float32, device=group.swap.cache.device)
    result = {}
    for member, of_table, piece in zip(group.members, ids, pieces, strict=True):
        assert member.optimizer is not None
        bound = member.optimizer.max_gradient
        result[member.config.name] = TableGradient(of_table, torch.cat([empty, *piece]).clamp(-bound, bound))
    return result
