"""Norms of table gradients: pending gradients, or gradients of the last update, over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from .handles import TableParameter


class GradientNorms(NamedTuple):
    """Norms of gradients.

    Attributes:
        total: norm of the gradients of all tables together.
        tables: norm of each table's gradient, by table name.
    """

    total: float
    tables: dict[str, float]


def combined_norm(norms: Iterable[float], norm_type: float) -> float:
    """Returns the norm of a vector from the norms of its parts, computed in float64."""
    vector = torch.tensor([0.0, *norms], dtype=torch.float64, device="cpu")
    return float(torch.linalg.vector_norm(vector, norm_type))


def pending_norms(handles: Mapping[str, TableParameter], norm_type: float) -> dict[str, float]:
    """Returns the norm of each table's pending gradient on this rank; 0 if a table has none."""
    grads = {name: handle.grad for name, handle in handles.items()}
    none = torch.zeros((), device="cpu")
    norms = [none if grad is None else torch.linalg.vector_norm(grad, norm_type) for grad in grads.values()]
    return dict(zip(grads, torch.stack([norm.cpu() for norm in norms]).tolist(), strict=True))
