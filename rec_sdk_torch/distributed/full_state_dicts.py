"""Whole tables in the full state dicts of torch.distributed.checkpoint: gathers their rows from all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist

from ..runtime.host_groups import exchanging, host_group
from .collectives import Exchange
from .gathering import as_bytes, rows_of_ranks

_on_all_ranks: ContextVar[bool | None] = ContextVar("_on_all_ranks", default=None)
"""Whether whole tables are gathered on all ranks (True) or on rank 0 (False); None if state dicts are not full."""


@contextlib.contextmanager
def full_state_dicts(on_all_ranks: bool = True) -> Iterator[None]:
    """Makes state dicts in the `with` block contain whole tables, on all ranks or on rank 0; loads expect them too."""
    token = _on_all_ranks.set(on_all_ranks)
    try:
        yield
    finally:
        _on_all_ranks.reset(token)


def has_whole_tables() -> bool:
    """Returns whether the state dict that is being created or loaded contains whole tables."""
    return _on_all_ranks.get() is not None


def gather_whole_table(
    table: str, ids: torch.Tensor, weight: torch.Tensor, exchange: Exchange
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the ids and weights of all ranks in ascending order of ids (collective).

    If `full_state_dicts` was entered for rank 0 only, the tensors are empty on other ranks.

    Args:
        table: the table's name.
        ids: ids of this rank's rows.
        weight: weights of this rank's rows, `[n, D]`.
        exchange: the exchanges with the ranks that have the other rows.
    """
    on_all_ranks = bool(_on_all_ranks.get())
    group = host_group(exchange.ids, "gathered state dicts")
    with exchanging(f"the rows of table {table!r} for a full state dict", group):
        counts: list[Any] = [0] * exchange.world_size
        dist.all_gather_object(counts, len(ids), group=group)
        parts = list(rows_of_ranks(ids, weight, counts, group))
        if exchange.rank == 0:
            ids, order = torch.cat([part for part, _ in parts]).sort()
            weight = torch.cat([part for _, part in parts])[order]
        else:
            count = sum(counts) if on_all_ranks else 0
            ids, weight = ids.new_empty(count), weight.new_empty((count, weight.shape[1]))
        if on_all_ranks and sum(counts):
            for part in (ids, weight):
                dist.broadcast(as_bytes(part), group=group, group_src=0)
    return ids, weight
