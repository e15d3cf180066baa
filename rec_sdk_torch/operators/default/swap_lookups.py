"""The kernels of swap_lookup_sequence and swap_lookup_pooled: a swap, and then lookups in the cache."""

from __future__ import annotations

import torch

from .checks import MAX_DIM, Checker
from .lookups import PooledArguments, pool
from .moves import scatter, swap
from .write import Write

_Optional = torch.Tensor | None


def swap_lookup_sequence(
    cache: torch.Tensor,
    slots: torch.Tensor,
    victim_indices: _Optional,
    rows: torch.Tensor,
    victims: _Optional,
    dim: int,
    weight_dtype: torch.dtype,
    lookup_slots: torch.Tensor,
    origins: torch.Tensor,
) -> Write:
    """Swaps rows, and reads the row of each lookup; see op_kernels/swap_lookup_sequence/README.md."""
    check = Checker("swap_lookup_sequence", cache)
    _check_dim(check, cache, dim, weight_dtype)
    new_rows = _check_lookups(check, cache, slots, lookup_slots, origins)
    write = _swap(check, cache, slots, victim_indices, rows, victims)
    looked_up = _look_up(cache, rows, dim, weight_dtype, lookup_slots, new_rows)
    return write._replace(result=looked_up)


def swap_lookup_pooled(
    cache: torch.Tensor,
    slots: torch.Tensor,
    victim_indices: _Optional,
    rows: torch.Tensor,
    victims: _Optional,
    dim: int,
    weight_dtype: torch.dtype,
    lookup_slots: torch.Tensor,
    origins: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: _Optional,
    columns: torch.Tensor,
    mean: torch.Tensor,
    first_bag: int,
    out: torch.Tensor,
) -> Write:
    """Swaps rows, and pools the rows of each bag into `out`; see op_kernels/swap_lookup_pooled/README.md."""
    check = Checker("swap_lookup_pooled", cache)
    _check_dim(check, cache, dim, weight_dtype)
    new_rows = _check_lookups(check, cache, slots, lookup_slots, origins)
    bags = PooledArguments(lookup_slots.shape[0], dim, offsets, per_sample_weights, columns, mean, first_bag, out)
    checked = bags.check(check)
    write = _swap(check, cache, slots, victim_indices, rows, victims)
    pool(bags, checked, _look_up(cache, rows, dim, weight_dtype, lookup_slots, new_rows))
    return write


def _check_dim(check: Checker, cache: torch.Tensor, dim: int, weight_dtype: torch.dtype) -> None:
    check.tensor("cache", cache, torch.uint8, 2)
    check.require(1 <= dim <= MAX_DIM, f"dim must be in [1, {MAX_DIM}], got {dim}")
    check.storage_dtype("weight_dtype", weight_dtype)
    value, width = weight_dtype.itemsize, cache.shape[1]
    check.require(
        width % value == 0 and width >= dim * value,
        f"cache must have a multiple of {value} bytes per row, at least {dim * value} for dim {dim}, got {width}",
    )


def _check_lookups(
    check: Checker,
    cache: torch.Tensor,
    slots: torch.Tensor,
    lookup_slots: torch.Tensor,
    origins: torch.Tensor,
) -> torch.Tensor:
    """Checks the lookups; returns each lookup's index into the swapped-in rows, int64 `[N]`.

    The index is negative if the row was in the cache before the swap.
    """
    check.vector("slots", slots, torch.int32)
    check.vector("lookup_slots", lookup_slots, torch.int32)
    check.vector("origins", origins, torch.int32, lookup_slots.shape[0])
    cached, count = cache.shape[0], slots.shape[0]
    at = check.indices("slots", slots, cached)
    looked_up = check.indices("lookup_slots", lookup_slots, cached)
    actual = check.indices("origins", origins, cached + count)
    of_slot = torch.arange(cached, device=cache.device)
    of_slot[at] = torch.arange(cached, cached + count, device=cache.device)
    expected = of_slot[looked_up]
    check.require_none(
        actual != expected,
        lambda i: f"origins must be {int(expected[i])} for slot {int(looked_up[i])}, got {int(actual[i])} at index {i}",
    )
    return actual - cached


def _swap(
    check: Checker,
    cache: torch.Tensor,
    slots: torch.Tensor,
    victim_indices: _Optional,
    rows: torch.Tensor,
    victims: _Optional,
) -> Write:
    check.require(
        (victim_indices is None) == (victims is None),
        "victim_indices and victims belong together: give both, or neither where no row leaves",
    )
    if victim_indices is None or victims is None:
        return scatter(check, cache, slots, rows)
    return swap(check, cache, slots, victim_indices, rows, victims)


def _look_up(
    cache: torch.Tensor,
    rows: torch.Tensor,
    dim: int,
    weight_dtype: torch.dtype,
    lookup_slots: torch.Tensor,
    new_rows: torch.Tensor,
) -> torch.Tensor:
    """Returns the weights that the lookups read after the swap, float32 `[N, dim]`."""
    records, is_new = cache.index_select(0, lookup_slots), new_rows >= 0
    records[is_new] = rows[new_rows[is_new]]
    return records.view(weight_dtype)[:, :dim].float()
