"""Row records and batches, as the operators take them."""

from __future__ import annotations

from typing import Any

import torch

from rec_sdk_torch.formulas import FORMULAS
from rec_sdk_torch.operators.default import KERNELS, Write
from rec_sdk_torch.operators.record import RecordLayout

INF = float("inf")
OPTIMIZERS = tuple(FORMULAS)
Device = torch.device | str


def int32(values: object, device: Device = "cpu") -> torch.Tensor:
    return torch.as_tensor(values).to(device=device, dtype=torch.int32)


class Cache:
    """A device cache, with typed views of its weights and states."""

    def __init__(
        self,
        weights: torch.Tensor,
        states: list[torch.Tensor] | None = None,
        dtype: torch.dtype = torch.float32,
        device: Device = "cpu",
    ) -> None:
        states = states or []
        self.slots, self.dim = weights.shape
        self.dtype = dtype
        layout = RecordLayout(self.dim, dtype, tuple(state.shape[1] for state in states))
        self.records = torch.zeros(self.slots, layout.bytes, dtype=torch.uint8, device=device)
        self.weights = layout.weight(self.records)
        self.weights.copy_(weights)
        self.states = [layout.state(self.records, i) for i in range(len(states))]
        for view, state in zip(self.states, states, strict=True):
            view.copy_(state)


def default(name: str, *args: Any, **kwargs: Any) -> Any:
    """An operator in plain torch: the reference of its kernels, whose bits it has."""
    done = KERNELS[name](*args, **kwargs)
    if isinstance(done, Write):
        done.to[done.at] = done.rows
        return done.result
    return done


def states_of(optimizer: str, dim: int) -> list[int]:
    """Elements of each state of an optimizer."""
    return list(FORMULAS[optimizer].state_elements(dim))


def segments(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """unique_slots, segment_offsets and the lookups in segment order."""
    unique, inverse, counts = torch.unique(slots, return_inverse=True, return_counts=True)
    offsets = torch.zeros(len(unique) + 1, dtype=torch.int32, device=slots.device)
    offsets[1:] = torch.cumsum(counts, 0)
    return unique.int(), offsets, torch.argsort(inverse, stable=True).int()


def coefficients(*values: float, max_gradient: float = INF, device: Device = "cpu") -> torch.Tensor:
    row = [max_gradient, *values]
    return torch.tensor([row + [0.0] * (16 - len(row))], dtype=torch.float32, device=device)


def update(
    cache: Cache,
    grad: torch.Tensor,
    slots: torch.Tensor,
    optimizer: str,
    row: torch.Tensor,
    scale: torch.Tensor | None = None,
) -> None:
    """One update of one table; lookup j of `slots` reads row j of `grad`."""
    unique, offsets, positions = segments(slots)
    tables = int32([0, len(unique)], slots.device)
    if scale is not None:
        scale = scale[positions.long()]
    lookups = (unique, tables, offsets, positions, None, None, scale)
    torch.ops.rec_sdk.update_rows(cache.records, [grad], *lookups, row, optimizer, cache.dim, cache.dtype)


def random_bytes(rows: int, bytes_: int, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.randint(0, 256, (rows, bytes_), dtype=torch.uint8).to(device)
