"""One call of each operator on an NPU, with the least bytes that it has to move."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from rec_sdk_torch.formulas import FORMULAS
from rec_sdk_torch.ops import hot_segments, ops
from rec_sdk_torch.record import RecordLayout
from rec_sdk_torch.tbe.config.optimizer import COEFFICIENTS

from .ids import Distribution

BAG = 8
"""Lookups of a bag."""


@dataclass(frozen=True)
class Call:
    """An operator's call on a batch.

    Attributes:
        name: operator and variant.
        run: does it.
        least_bytes: every index once, every gradient and looked-up row once, every updated record once each way,
            every output once. Rows looked up again count again: only a cache could save them.
    """

    name: str
    run: Callable[[], object]
    least_bytes: int


@dataclass(frozen=True)
class Batch:
    """Lookups of a table, and the segments of their rows, on a device.

    Attributes:
        slots: int32 `[N]`.
        unique: int32 `[U]`, the distinct slots.
        offsets: int32 `[U + 1]`, segment borders.
        positions: int32 `[N]`, the lookups ordered by row.
        hot_segments: int32 `[H, 4]`, of the rows with many lookups.
    """

    slots: torch.Tensor
    unique: torch.Tensor
    offsets: torch.Tensor
    positions: torch.Tensor
    hot_segments: torch.Tensor

    @classmethod
    def draw(cls, distribution: Distribution, rows: int, lookups: int, device: torch.device) -> Batch:
        """A batch of seed 0."""
        slots = distribution.draw(np.random.default_rng(0), rows, lookups)
        unique, counts = np.unique(slots, return_counts=True)
        offsets = np.cumsum([0, *counts])
        arrays = (slots, unique, offsets, np.argsort(slots, kind="stable"), hot_segments(offsets))
        return cls(*(torch.from_numpy(a.astype(np.int32)).to(device) for a in arrays))


def _layout(dim: int, optimizer: str, dtype: torch.dtype = torch.float32) -> RecordLayout:
    return RecordLayout(dim, dtype, FORMULAS[optimizer].state_elements(dim))


def _cache(rows: int, layout: RecordLayout, device: torch.device) -> torch.Tensor:
    return torch.zeros((rows, layout.bytes), dtype=torch.uint8, device=device)


def _record_bytes(layout: RecordLayout) -> int:
    return layout.dim * layout.weight_dtype.itemsize + 4 * sum(layout.state_elements)


def lookups(batch: Batch, rows: int, dim: int, device: torch.device) -> Iterator[Call]:
    """Sequence and pooled lookups, and the gradient of sample weights; weights in fp32 and bf16."""
    n = len(batch.slots)
    bags = n // BAG
    offsets = torch.arange(0, n + 1, BAG, device=device)
    columns = torch.zeros(1, dtype=torch.int64, device=device)
    mean = torch.zeros(1, dtype=torch.bool, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        layout = _layout(dim, "adagrad", dtype)
        weights = layout.weight(_cache(rows, layout, device))
        read = n * dim * dtype.itemsize + 4 * n
        name = str(dtype).removeprefix("torch.")
        yield Call(f"lookup_sequence {name}", partial(ops.lookup_sequence, weights, batch.slots), read + 4 * n * dim)
        out = torch.zeros((bags, dim), device=device)
        pooled = read + 8 * bags + 4 * bags * dim
        yield Call(
            f"lookup_pooled {name}",
            partial(ops.lookup_pooled, weights, batch.slots, offsets, None, columns, mean, 0, out),
            pooled,
        )
        yield Call(
            f"pooled_weights_grad {name}",
            partial(ops.pooled_weights_grad, weights, batch.slots, offsets, out, columns, mean),
            pooled + 4 * n,
        )


def copies(batch: Batch, rows: int, dim: int, device: torch.device) -> Iterator[Call]:
    """Records of the distinct rows, out of the cache and into it."""
    layout = _layout(dim, "adagrad")
    cache = _cache(rows, layout, device)
    least = len(batch.unique) * (4 + 2 * layout.bytes)
    records = torch.zeros((len(batch.unique), layout.bytes), dtype=torch.uint8, device=device)
    yield Call("gather_rows", partial(ops.gather_rows, cache, batch.unique), least)
    yield Call("scatter_rows", partial(ops.scatter_rows, cache, batch.unique, records), least)
    places = torch.arange(len(records), dtype=torch.int32, device=device)
    swap = partial(ops.swap_rows, cache, batch.unique, places, records, torch.empty_like(records))
    yield Call("swap_rows", swap, len(records) * (8 + 4 * layout.bytes))


def updates(batch: Batch, rows: int, dim: int, device: torch.device, optimizers: Iterable[str]) -> Iterator[Call]:
    """The optimizers, and the sums of an accumulation window."""
    n, u = len(batch.slots), len(batch.unique)
    grad = torch.zeros((n, dim), device=device)
    segments = (batch.offsets, batch.positions, None, None, None)
    read = 4 * n * dim + 4 * n + 8 * u
    for optimizer in optimizers:
        layout = _layout(dim, optimizer)
        cache = _cache(rows, layout, device)
        tables = torch.tensor([0, u], dtype=torch.int32, device=device)
        coefficients = torch.zeros((1, COEFFICIENTS), device=device)
        coefficients[0] = torch.linspace(0.1, 0.9, COEFFICIENTS, device=device)
        coefficients[0, 0] = float("inf")
        yield Call(
            f"update_rows {optimizer}",
            partial(
                ops.update_rows,
                cache,
                [grad],
                batch.unique,
                tables,
                *segments,
                coefficients,
                optimizer,
                dim,
                torch.float32,
                hot_segments=batch.hot_segments,
            ),
            read + 2 * u * _record_bytes(layout),
        )
    pending = torch.zeros((rows, 2 * dim), device=device)
    yield Call(
        "accumulate_rows",
        partial(ops.accumulate_rows, pending, [grad], batch.unique, *segments, batch.hot_segments),
        read + 2 * u * 8 * dim,
    )


def calls(batch: Batch, rows: int, dim: int, device: torch.device, names: Iterable[str]) -> Iterator[Call]:
    """Every operator, update_rows by the optimizers that are among the `names` of calls."""
    yield from lookups(batch, rows, dim, device)
    yield from copies(batch, rows, dim, device)
    optimizers = [name.removeprefix("update_rows ") for name in names if name.startswith("update_rows ")]
    yield from updates(batch, rows, dim, device, optimizers)
