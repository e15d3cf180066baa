"""The kernels that copy records from and to a cache: gather_rows, scatter_rows, swap_rows."""

from __future__ import annotations

import torch

from .checks import Checker
from .write import Write


def _check_records(check: Checker, cache: torch.Tensor) -> None:
    check.tensor("cache", cache, torch.uint8, 2)
    check.contiguous("cache", cache)


def _check_packed(check: Checker, cache: torch.Tensor, name: str, rows: torch.Tensor, count: int) -> None:
    """Checks that `rows` are `count` contiguous records; with a cache on CUDA, they may be in pinned host memory."""
    check.type_and_rank(name, rows, torch.uint8, 2)
    near = rows.device == cache.device or (cache.is_cuda and rows.is_pinned())
    check.require(near, f"{name} must be on the device of the first argument, or for CUDA in pinned host memory")
    check.contiguous(name, rows)
    wanted, found = [count, cache.shape[1]], list(rows.shape)
    check.require(found == wanted, f"{name} must be {wanted}, got {found}")


def gather_rows(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Copies records out of the cache; see op_kernels/gather_rows/README.md."""
    check = Checker("gather_rows", cache)
    _check_records(check, cache)
    check.vector("slots", slots, torch.int32)
    return cache.index_select(0, check.indices("slots", slots, cache.shape[0]))


def gather_rows_out(cache: torch.Tensor, slots: torch.Tensor, *, out: torch.Tensor) -> None:
    """Copies records out of the cache into `out`; see op_kernels/gather_rows/README.md."""
    check = Checker("gather_rows", cache)
    _check_records(check, cache)
    check.vector("slots", slots, torch.int32)
    _check_packed(check, cache, "out", out, slots.shape[0])
    out.copy_(gather_rows(cache, slots))


def scatter_rows(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> Write:
    """Copies records into the cache; see op_kernels/scatter_rows/README.md."""
    return scatter(Checker("scatter_rows", cache), cache, slots, rows)


def scatter(check: Checker, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> Write:
    """Copies records into the cache like `scatter_rows`, as a part of an operator that `check` names in errors."""
    _check_records(check, cache)
    check.vector("slots", slots, torch.int32)
    _check_packed(check, cache, "rows", rows, slots.shape[0])
    return Write(cache, check.indices("slots", slots, cache.shape[0]), rows.to(cache.device))


def swap_rows(
    cache: torch.Tensor, slots: torch.Tensor, victim_indices: torch.Tensor, rows: torch.Tensor, victims: torch.Tensor
) -> Write:
    """Copies victims out of the cache and new records into it; see op_kernels/swap_rows/README.md."""
    return swap(Checker("swap_rows", cache), cache, slots, victim_indices, rows, victims)


def swap(
    check: Checker,
    cache: torch.Tensor,
    slots: torch.Tensor,
    victim_indices: torch.Tensor,
    rows: torch.Tensor,
    victims: torch.Tensor,
) -> Write:
    """Copies victims out of the cache and returns the write of the new records, as a part of an operator that swaps."""
    _check_records(check, cache)
    check.vector("slots", slots, torch.int32)
    count = slots.shape[0]
    check.vector("victim_indices", victim_indices, torch.int32, count)
    _check_packed(check, cache, "rows", rows, count)
    leave = victims.shape[0] if victims.dim() else 0
    _check_packed(check, cache, "victims", victims, leave)
    check.require(leave <= count, f"victims must have at most {count} rows, got {leave}")
    at = check.indices("slots", slots, cache.shape[0])
    _check_victim_indices(check, victim_indices.long(), leave)
    victims.copy_(cache.index_select(0, at[victim_indices >= 0]))
    return Write(cache, at, rows.to(cache.device))


def _check_victim_indices(check: Checker, victim_indices: torch.Tensor, victims: int) -> None:
    """Checks that `victim_indices` numbers the victims 0, 1, ... in the order of `slots`, with -1 for other slots."""
    leaves = (victim_indices >= 0).long()
    expected = leaves.cumsum(0) - leaves
    check.require_none(
        (victim_indices != -1) & (victim_indices != expected),
        lambda i: (
            f"victim_indices must be -1 or the next of 0, 1, ..., here {int(expected[i])}, "
            f"got {int(victim_indices[i])} at index {i}"
        ),
    )
    found = int(leaves.sum())
    check.require(
        found == victims, f"victims must have one row for each of the {found} indices that are not -1, got {victims}"
    )
