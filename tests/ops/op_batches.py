"""Row records and batches, as the operators take them."""

from __future__ import annotations

import torch

INF = float("inf")
OPTIMIZERS: dict[str, list[int]] = {
    "sgd": [],
    "adagrad": [0],
    "rowwise_adagrad": [1],
    "decayed_rowwise_adagrad": [1],
    "bounded_rowwise_adagrad": [1],
    "ensemble_rowwise_adagrad": [0, 1],
    "globally_decayed_rowwise_adagrad": [1, 1],
    "cowclip_rowwise_adagrad": [1, 1, 1],
    "counted_rowwise_adagrad": [1, 1, 1],
    "counted_adagradw": [1, 1, 1],
    "adam": [0, 0],
    "adamw": [0, 0],
    "partial_rowwise_adam": [0, 1],
    "lamb": [0, 0],
    "partial_rowwise_lamb": [0, 1],
    "lars_sgd": [0],
}
"""Elements of each state; 0: as many as the weight has."""
Device = torch.device | str


def int32(values: object, device: Device = "cpu") -> torch.Tensor:
    return torch.as_tensor(values).to(device=device, dtype=torch.int32)


def record_bytes(dim: int, dtype: torch.dtype, state_elements: list[int]) -> tuple[int, list[int]]:
    """Bytes of a record, and the offset of each state."""
    end, offsets = dim * dtype.itemsize, []
    for elements in state_elements:
        offsets.append(-(-end // 4) * 4)
        end = offsets[-1] + 4 * elements
    return -(-end // 16) * 16, offsets


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
        bytes_, offsets = record_bytes(self.dim, dtype, [s.shape[1] for s in states])
        self.records = torch.zeros(self.slots, bytes_, dtype=torch.uint8, device=device)
        self.weights = self.records.view(dtype)[:, : self.dim]
        self.weights.copy_(weights)
        as_float = self.records.view(torch.float32)
        starts = [offset // 4 for offset in offsets]
        self.states = [as_float[:, o : o + s.shape[1]] for o, s in zip(starts, states, strict=True)]
        for view, state in zip(self.states, states, strict=True):
            view.copy_(state)


def states_of(optimizer: str, dim: int) -> list[int]:
    """Elements of each state of an optimizer."""
    return [elements or dim for elements in OPTIMIZERS[optimizer]]


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
