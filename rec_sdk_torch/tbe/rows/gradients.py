"""Gradients of tables with the optimizer SparseGradients, which are returned instead of applied."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import NamedTuple

import torch

from ..cache.device_cache import Group
from ..cache.update_journal import Run, UpdateJournal


class TableGradient(NamedTuple):
    """The gradient of some rows of a table.

    Attributes:
        ids: int64 `[n]`, distinct ids, or row numbers of an index table; on the host.
        rows: float32 `[n, D]`, the gradient of each row; on the device of the cache.
    """

    ids: torch.Tensor
    rows: torch.Tensor

    def sparse(self, num_rows: int) -> torch.Tensor:
        """Returns a coalesced sparse COO tensor `[num_rows, D]`, like the gradient of torch.nn.Embedding(sparse=True).

        All ids must be less than `num_rows`.
        """
        order = torch.argsort(self.ids)
        shape = (num_rows, self.rows.shape[1])
        ids, rows = self.ids[order].to(self.rows.device), self.rows[order.to(self.rows.device)]
        return torch.sparse_coo_tensor(
            ids[None], rows, shape, device=rows.device, is_coalesced=True, check_invariants=True
        )


def collect_gradients(group: Group) -> dict[str, TableGradient]:
    """Returns the gradients that a group has accumulated since the last call, by table name, and clears them."""
    buffer = group.accumulation_buffer
    assert buffer is not None
    group.swap.settle()
    ids = [torch.from_numpy(group.engine.saves.window_ids(table).copy()) for table in range(len(group.members))]
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

    buffer.close(group.swap.cache, collect, UpdateJournal())
    empty = torch.empty((0, group.layout.dim), dtype=torch.float32, device=group.swap.cache.device)
    result = {}
    for member, table_ids, piece in zip(group.members, ids, pieces, strict=True):
        assert member.optimizer is not None
        bound = member.optimizer.max_gradient
        result[member.config.name] = TableGradient(table_ids, torch.cat([empty, *piece]).clamp(-bound, bound))
    return result
