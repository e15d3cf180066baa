"""Norms of the gradients of tables, those that wait for `step()` or of the last update, over all ranks that have rows
of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from .handles import TableParameter


class GradientNorms(NamedTuple):
    """Norms of gradients.

    Attributes:
        total: of all tables together.
        tables: of each table by its name.
    """

    total: float
    tables: dict[str, float]


def combined_norm(norms: Iterable[float], norm_type: float) -> float:
    """The norm of parts that have these norms, computed in float64."""
    every = torch.tensor([0.0, *norms], dtype=torch.float64, device="cpu")
    return float(torch.linalg.vector_norm(every, norm_type))


def pending_norms(handles: Mapping[str, TableParameter], norm_type: float) -> dict[str, float]:
    """Returns the norm of each table's gradient that waits for `step()`, of the rows of this rank."""
    grads = {name: handle.grad for name, handle in handles.items()}
    none = torch.zeros((), device="cpu")
    norms = [none if grad is None else torch.linalg.vector_norm(grad, norm_type) for grad in grads.values()]
    return dict(zip(grads, torch.stack([norm.cpu() for norm in norms]).tolist(), strict=True))
