"""Builds row records, batches and operator calls for the tests of operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rec_sdk_torch.formulas import FORMULAS
from rec_sdk_torch.operators.calls import ops
from rec_sdk_torch.operators.default import KERNELS, Write
from rec_sdk_torch.operators.record import RecordLayout

INF = float("inf")
OPTIMIZERS = tuple(FORMULAS)
Device = torch.device | str
Arguments = dict[str, Any]


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
    """Calls the default operator in plain torch, to which kernels must be bit-identical."""
    done = KERNELS[name](*args, **kwargs)
    if isinstance(done, Write):
        done.to[done.at] = done.rows
        return done.result
    return done


def states_of(optimizer: str, dim: int) -> list[int]:
    """Returns the number of elements of each state of an optimizer."""
    return list(FORMULAS[optimizer].state_elements(dim))


def segments(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the arguments unique_slots and segment_offsets, and the lookups in segment order."""
    unique, inverse, counts = torch.unique(slots, return_inverse=True, return_counts=True)
    offsets = torch.zeros(len(unique) + 1, dtype=torch.int32, device=slots.device)
    offsets[1:] = torch.cumsum(counts, 0)
    return unique.int(), offsets, torch.argsort(inverse, stable=True).int()


def segments_of(slots: torch.Tensor, scale: torch.Tensor | None = None) -> Arguments:
    """Returns the segment arguments for one gradient tensor whose row j belongs to lookup j of `slots`."""
    unique, offsets, lookups = segments(slots)
    scale = None if scale is None else scale[lookups.long()]
    return {"unique_slots": unique, "segment_offsets": offsets, "grad_row": lookups, "scale": scale}


def coefficients(*values: float, max_gradient: float = INF, device: Device = "cpu") -> torch.Tensor:
    row = [max_gradient, *values]
    return torch.tensor([row + [0.0] * (16 - len(row))], dtype=torch.float32, device=device)


def update_arguments(
    cache: Cache, grads: list[torch.Tensor], optimizer: str, row: torch.Tensor, **given: Any
) -> Arguments:
    """Returns the arguments of update_rows for one table; optional arguments default to None."""
    rows = len(given["unique_slots"])
    arguments = {"cache": cache.records, "grads": grads, "table_offsets": int32([0, rows], cache.records.device)}
    arguments |= dict.fromkeys(("grad_source", "grad_column", "scale")) | given
    return arguments | {"coefficients": row, "optimizer": optimizer, "dim": cache.dim, "weight_dtype": cache.dtype}


def update(
    cache: Cache,
    grad: torch.Tensor,
    slots: torch.Tensor,
    optimizer: str,
    row: torch.Tensor,
    scale: torch.Tensor | None = None,
) -> None:
    """Runs an update of one table in which lookup j of `slots` reads row j of `grad`."""
    ops.update_rows(**update_arguments(cache, [grad], optimizer, row, **segments_of(slots, scale)))


def accumulate(pending: torch.Tensor, grads: list[torch.Tensor], **given: Any) -> None:
    """Calls accumulate_rows; optional arguments default to None."""
    ops.accumulate_rows(pending, grads, **dict.fromkeys(("grad_source", "grad_column", "scale")) | given)


def random_bytes(rows: int, bytes_: int, device: Device = "cpu") -> torch.Tensor:
    return torch.randint(0, 256, (rows, bytes_), dtype=torch.uint8).to(device)


def moved(value: Any, device: Device) -> Any:
    """Copies a tensor, or each tensor in a list or in arguments, to a device; strides and offsets are kept."""
    if isinstance(value, dict):
        return {key: moved(each, device) for key, each in value.items()}
    if isinstance(value, list):
        return [moved(each, device) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    elements = value.untyped_storage().nbytes() // value.element_size()
    whole = value.as_strided((elements,), (1,), 0).to(device, copy=True)
    return whole.as_strided(value.shape, value.stride(), value.storage_offset())


@dataclass
class Bags:
    """Pooled lookups of several features; `out` `[samples, columns]` is filled with NaN."""

    weights: torch.Tensor
    slots: torch.Tensor
    offsets: torch.Tensor
    sample_weights: torch.Tensor
    columns: torch.Tensor
    mean: torch.Tensor
    out: torch.Tensor

    def lookup(self, sample_weights: torch.Tensor | None, first_bag: int, out: torch.Tensor) -> torch.Tensor:
        """Calls lookup_pooled; returns `out`."""
        bags = (self.weights, self.slots, self.offsets, sample_weights, self.columns, self.mean)
        ops.lookup_pooled(*bags, first_bag, out)
        return out

    def weights_grad(self, grad: torch.Tensor) -> torch.Tensor:
        """Calls pooled_weights_grad."""
        found: torch.Tensor = ops.pooled_weights_grad(
            self.weights, self.slots, self.offsets, grad, self.columns, self.mean
        )
        return found


def make_bags(
    lengths: list[int], samples: int, dim: int, dtype: torch.dtype = torch.float32, device: Device = "cpu"
) -> Bags:
    """Builds bags with `lengths` feature by feature; every second feature has mean pooling."""
    features = len(lengths) // samples
    generator = torch.Generator().manual_seed(len(lengths) + dim)
    cache = Cache(torch.randn(40, dim, generator=generator), [torch.ones(40, 1)], dtype, device)
    total = sum(lengths)
    columns = [2 + (dim + 1) * f for f in range(features)]
    return Bags(
        cache.weights,
        int32(torch.randint(0, 40, (total,), generator=generator), device),
        torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()] if lengths else [0], device=device),
        torch.rand(total, generator=generator).to(device),
        torch.tensor(columns[::-1], dtype=torch.int64, device=device),
        torch.tensor([f % 2 == 1 for f in range(features)], dtype=torch.bool, device=device),
        torch.full((samples, 3 + (dim + 1) * features), float("nan"), device=device),
    )


def good_calls(device: Device) -> dict[str, tuple[Callable[..., object], Arguments]]:
    """Returns every operator together with valid arguments."""
    slots = int32([1, 1, 4], device)
    unique, offsets, lookups = segments(slots)
    cache = Cache(torch.arange(40.0).view(5, 8), device=device)
    bags: Arguments = {
        "weights": cache.weights,
        "slots": slots,
        "offsets": torch.tensor([0, 2, 3], device=device),
        "columns": torch.tensor([0], device=device),
        "mean": torch.tensor([True], device=device),
    }
    sums: Arguments = {
        "grads": [torch.ones(2, 8, device=device), torch.ones(1, 8, device=device)],
        "unique_slots": unique,
        "segment_offsets": offsets,
        "grad_row": int32([0, 1, 0], device),
        "grad_source": int32([0, 0, 1], device),
        "grad_column": lookups * 0,
        "scale": torch.ones(3, device=device),
    }
    update: Arguments = {
        "table_offsets": int32([0, 2], device),
        "coefficients": coefficients(0.1, device=device),
        "optimizer": "sgd",
        "dim": 8,
        "weight_dtype": torch.float32,
    }
    pooled: Arguments = {
        "per_sample_weights": torch.ones(3, device=device),
        "first_bag": 0,
        "out": torch.ones(2, 8, device=device),
    }
    copy: Arguments = {"cache": cache.records, "slots": int32([1, 0, 4], device)}
    rows = Cache(torch.arange(100.0, 124.0).view(3, 8), device=device).records
    swap: Arguments = copy | {
        "victim_indices": int32([-1, 0, 1], device),
        "rows": rows,
        "victims": torch.zeros_like(rows[:2]),
    }
    looked_up: Arguments = {
        "dim": 8,
        "weight_dtype": torch.float32,
        "lookup_slots": slots,
        "origins": int32([5, 5, 7], device),
    }
    of_bags = {name: bags[name] for name in ("offsets", "columns", "mean")}
    return {
        "lookup_sequence": (ops.lookup_sequence, {"weights": cache.weights, "slots": slots}),
        "lookup_pooled": (ops.lookup_pooled, bags | pooled),
        "pooled_weights_grad": (ops.pooled_weights_grad, bags | {"grad": torch.ones(2, 8, device=device)}),
        "update_rows": (ops.update_rows, {"cache": cache.records} | sums | update),
        "accumulate_rows": (ops.accumulate_rows, {"pending": torch.zeros(5, 16, device=device)} | sums),
        "gather_rows": (ops.gather_rows, copy),
        "gather_rows.out": (ops.gather_rows.out, copy | {"out": rows}),
        "scatter_rows": (ops.scatter_rows, copy | {"rows": rows}),
        "swap_rows": (ops.swap_rows, swap),
        "swap_lookup_sequence": (ops.swap_lookup_sequence, swap | looked_up),
        "swap_lookup_pooled": (ops.swap_lookup_pooled, swap | looked_up | of_bags | pooled),
    }
