"""Norms of the gradients of tables, those that wait for `step()` or of the last update, over all ranks that have rows
of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from ..tbe import TableBatchedEmbedding
from .handles import Ranks, TableParameter


class GradientNorms(NamedTuple):
    """Norms of gradients.

    Attributes:
        total: of all tables together.
        tables: of each table by its name.
    """

    total: float
    tables: dict[str, float]


def together(norms: Iterable[float], norm_type: float) -> float:
    """The norm of parts that have these norms, computed in float64."""
    every = torch.tensor([0.0, *norms], dtype=torch.float64, device="cpu")
    return float(torch.linalg.vector_norm(every, norm_type))


def gradient_norms(
    handles: Mapping[str, TableParameter], embedding: TableBatchedEmbedding, norm_type: float, local: bool = False
) -> GradientNorms:
    """See `CachedCollection.grad_norm`.

    Args:
        handles: of the tables of one collection, by name.
        embedding: has the tables.
        norm_type: p of the norm, which may be infinite.
        local: of the rows of this rank alone.
    """
    own = _of_waiting(handles, norm_type) if embedding.options.updates_at_step else embedding.counted_norms(norm_type)
    tables = {name: own[name] for name in handles}
    divided: dict[Ranks, list[str]] = {}
    for name, handle in handles.items():
        if handle.ranks is not None and not local:
            divided.setdefault(handle.ranks, []).append(name)
    for ranks, names in divided.items():
        of_ranks = ranks.tell([tables[name] for name in names], "norms of gradients")
        tables |= {
            name: together(each, norm_type) for name, each in zip(names, zip(*of_ranks, strict=True), strict=True)
        }
    return GradientNorms(together(tables.values(), norm_type), tables)


def _of_waiting(handles: Mapping[str, TableParameter], norm_type: float) -> dict[str, float]:
    grads = {name: handle.grad for name, handle in handles.items()}
    none = torch.zeros((), device="cpu")
    norms = [none if grad is None else torch.linalg.vector_norm(grad, norm_type) for grad in grads.values()]
    return dict(zip(grads, torch.stack([norm.cpu() for norm in norms]).tolist(), strict=True))
