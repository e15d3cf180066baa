"""Sample calls of every operator on a batch. `npu_check`, the benchmarks and the tests iterate over them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..formulas import FORMULAS
from ..operators.calls import ops
from ..operators.record import WEIGHT_DTYPES, RecordLayout
from ..operators.schemas import COEFFICIENTS
from ..operators.segments import hot_segments

Tensors = Mapping[str, torch.Tensor]

BAG = 8
"""Number of lookups per bag."""

_MAX_GRADIENT = 1.5


@dataclass(frozen=True)
class Case:
    """An operator and the arguments to call it with.

    Attributes:
        name: operator and variant.
        arguments: arguments by their names in the schema.
        least_bytes: bytes that must be read or written: every index, gradient and output once, every looked-up row once
            per lookup, every updated record once in each direction. Only a hardware cache could avoid repeated reads
            of a row.
        layout: layout of the records that an update changes; the results are then the weights and states in them.
    """

    name: str
    arguments: Mapping[str, Any]
    least_bytes: int
    layout: RecordLayout | None = None

    @property
    def operator(self) -> str:
        """The operator's name in `torch.ops.rec_sdk`."""
        return self.name.split()[0]

    def to(self, device: torch.device | str) -> Case:
        """Returns this case with its tensor arguments copied to a device."""
        return replace(self, arguments={name: _copy(value, device) for name, value in self.arguments.items()})

    def call(self) -> object:
        """Runs the operator and returns its result."""
        return getattr(ops, self.operator)(**self.arguments)

    def results(self) -> Tensors:
        """Runs the operator; returns its result and the tensors that it wrote to, by name."""
        done = self.call()
        found = {"result": done} if isinstance(done, torch.Tensor) else {}
        for argument in getattr(ops, self.operator).default._schema.arguments:
            if argument.is_write and self.arguments.get(argument.name) is not None:
                found |= self._parts(argument.name)
        return found

    def _parts(self, name: str) -> dict[str, torch.Tensor]:
        written = self.arguments[name]
        if self.layout is None:
            return {name: written}
        states = {f"state {i}": self.layout.state(written, i) for i in range(len(self.layout.state_elements))}
        return {"weights": self.layout.weight(written), **states}


def _copy(value: Any, device: torch.device | str) -> Any:
    """Copies a tensor or a list of tensors to a device, with their strides; other values are returned as they are."""
    if isinstance(value, list):
        return [_copy(each, device) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device).copy_(value)


@dataclass(frozen=True)
class Batch:
    """Lookups of one table, and the segments of lookups that read the same row.

    Attributes:
        rows: number of rows of the table.
        slots: int32 `[N]`, cache slots of the lookups.
        unique: int32 `[U]`, the distinct slots.
        offsets: int32 `[U + 1]`, where the segment of each distinct row begins in `positions`.
        positions: int32 `[N]`, indices of the lookups, ordered by row.
        hot_segments: int32 `[H, 4]`, segments of the rows with many lookups.
    """

    rows: int
    slots: torch.Tensor
    unique: torch.Tensor
    offsets: torch.Tensor
    positions: torch.Tensor
    hot_segments: torch.Tensor

    @classmethod
    def from_lookups(cls, slots: npt.ArrayLike, rows: int) -> Batch:
        """Creates the batch of the lookups `slots` in a table of `rows` rows."""
        lookups = np.asarray(slots)
        unique, counts = np.unique(lookups, return_counts=True)
        offsets = np.cumsum([0, *counts])
        arrays = (lookups, unique, offsets, np.argsort(lookups, kind="stable"), hot_segments(offsets))
        return cls(rows, *(torch.from_numpy(a.astype(np.int32)) for a in arrays))

    @classmethod
    def random(cls, rows: int, lookups: int) -> Batch:
        """Creates a batch with a skewed distribution: a few rows have thousands of lookups."""
        drawn = torch.rand(lookups, generator=torch.Generator().manual_seed(0))
        return cls.from_lookups((drawn**4 * rows).int().numpy(), rows)

    def records(self, layout: RecordLayout) -> torch.Tensor:
        """Creates a record for each row of the table, with random weights of both signs and positive states."""
        generator = torch.Generator().manual_seed(1)
        records = torch.zeros((self.rows, layout.bytes), dtype=torch.uint8)
        layout.weight(records).copy_(torch.randn((self.rows, layout.dim), generator=generator))
        for index, elements in enumerate(layout.state_elements):
            layout.state(records, index).copy_(torch.rand((self.rows, elements), generator=generator) + 0.1)
        return records


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def copy_cases(batch: Batch, dim: int) -> Iterator[Case]:
    """Yields calls that copy the records of the batch's distinct rows out of the cache and into it."""
    layout = RecordLayout(dim, torch.float32, (dim,))
    cache, count = batch.records(layout), len(batch.unique)
    taken = {"cache": cache, "slots": batch.unique}
    rows = cache.flip(0)[:count].contiguous()
    least = count * (4 + 2 * layout.bytes)
    yield Case("gather_rows", taken, least)
    yield Case("scatter_rows", {**taken, "rows": rows}, least)
    victim_indices = torch.arange(count, dtype=torch.int32)
    swapped = {**taken, "victim_indices": victim_indices, "rows": rows, "victims": torch.empty_like(rows)}
    yield Case("swap_rows", swapped, count * (8 + 4 * layout.bytes))


def lookup_cases(
    batch: Batch, dim: int, dtypes: Sequence[torch.dtype] = WEIGHT_DTYPES, weighted: bool = True
) -> Iterator[Case]:
    """Yields calls for sequence lookups, pooled lookups, and gradients of sample weights.

    Args:
        batch: the lookups.
        dim: number of weights in a row.
        dtypes: data types of the weights.
        weighted: whether bags are pooled as weighted means; otherwise they are sums.
    """
    n = len(batch.slots)
    bags = n // BAG
    pooled = {
        "slots": batch.slots[: bags * BAG],
        "offsets": torch.arange(0, n + 1, BAG),
        "columns": torch.zeros(1, dtype=torch.int64),
        "mean": torch.full((1,), weighted),
    }
    scale = _values(bags * BAG) if weighted else None
    for dtype in dtypes:
        layout = RecordLayout(dim, dtype, (dim,))
        weights = layout.weight(batch.records(layout))
        read, short = n * (dim * dtype.itemsize + 4), _short(dtype)
        sequence = {"weights": weights, "slots": batch.slots}
        yield Case(f"lookup_sequence {short}", sequence, read + 4 * n * dim)
        read += bags * (8 + 4 * dim)
        out = {"per_sample_weights": scale, "first_bag": 0, "out": torch.zeros(bags, dim)}
        yield Case(f"lookup_pooled {short}", {"weights": weights, **pooled, **out}, read + 4 * n * weighted)
        grad = {"weights": weights, **pooled, "grad": _values(bags, dim)}
        yield Case(f"pooled_weights_grad {short}", grad, read + 4 * n)


def swap_lookup_cases(batch: Batch, dim: int, dtypes: Sequence[torch.dtype] = WEIGHT_DTYPES) -> Iterator[Case]:
    """Yields lookups fused with a swap: every second distinct row is a miss and replaces a victim in the cache."""
    missing = batch.unique[::2].clone()
    count, n = len(missing), len(batch.slots)
    of_slot = torch.arange(batch.rows, dtype=torch.int32)
    of_slot[missing.long()] = torch.arange(batch.rows, batch.rows + count, dtype=torch.int32)
    origins = of_slot[batch.slots.long()]
    bags = n // BAG
    pooled = {
        "offsets": torch.arange(0, n + 1, BAG),
        "per_sample_weights": None,
        "columns": torch.zeros(1, dtype=torch.int64),
        "mean": torch.zeros(1, dtype=torch.bool),
        "first_bag": 0,
        "out": torch.zeros(bags, dim),
    }
    for dtype in dtypes:
        layout = RecordLayout(dim, dtype, (dim,))
        cache = batch.records(layout)
        rows = cache.flip(0)[:count].contiguous()
        swap = {
            "cache": cache,
            "slots": missing,
            "victim_indices": torch.arange(count, dtype=torch.int32),
            "rows": rows,
            "victims": torch.empty_like(rows),
            "dim": dim,
            "weight_dtype": dtype,
        }
        moved, read, short = count * (8 + 4 * layout.bytes), n * (dim * dtype.itemsize + 4), _short(dtype)
        lookups = {"lookup_slots": batch.slots, "origins": origins}
        yield Case(f"swap_lookup_sequence {short}", {**swap, **lookups}, moved + read + 4 * n * dim)
        lookups = {name: each[: bags * BAG] for name, each in lookups.items()}
        least = moved + read + bags * (8 + 4 * dim)
        yield Case(f"swap_lookup_pooled {short}", {**swap, **lookups, **pooled}, least)


def update_cases(
    batch: Batch,
    dim: int,
    dtypes: Sequence[torch.dtype] = WEIGHT_DTYPES,
    optimizers: Iterable[str] = tuple(FORMULAS),
) -> Iterator[Case]:
    """Yields calls for the updates of all optimizers and for the accumulation of gradients."""
    n, u = len(batch.slots), len(batch.unique)
    sums = {
        "grads": [_values(n, dim)],
        "unique_slots": batch.unique,
        "segment_offsets": batch.offsets,
        "grad_row": batch.positions,
        "grad_source": None,
        "grad_column": None,
        "scale": None,
        "hot_segments": batch.hot_segments,
    }
    coefficients = torch.linspace(0.1, 0.9, COEFFICIENTS)[None]
    coefficients[0, 0] = _MAX_GRADIENT
    read = 4 * n * dim + 4 * n + 8 * u
    for optimizer in optimizers:
        for dtype in dtypes:
            layout = RecordLayout(dim, dtype, FORMULAS[optimizer].state_elements(dim))
            update = {
                "cache": batch.records(layout),
                **sums,
                "table_offsets": torch.tensor([0, u], dtype=torch.int32),
                "coefficients": coefficients,
                "optimizer": optimizer,
                "dim": dim,
                "weight_dtype": dtype,
            }
            stored = dim * dtype.itemsize + 4 * sum(layout.state_elements)
            variant = "" if dtype is torch.float32 else f" {_short(dtype)}"
            yield Case(f"update_rows {optimizer}{variant}", update, read + 2 * u * stored, layout)
    pending = torch.zeros((batch.rows, 2 * dim))
    yield Case("accumulate_rows", {"pending": pending, **sums}, read + 2 * u * 8 * dim)


def all_cases(batch: Batch, dim: int, optimizers: Iterable[str] = tuple(FORMULAS)) -> Iterator[Case]:
    """Yields calls of every operator, the simplest kernels first."""
    yield from copy_cases(batch, dim)
    yield from lookup_cases(batch, dim)
    yield from swap_lookup_cases(batch, dim)
    yield from update_cases(batch, dim, optimizers=optimizers)
