"""The kernels of lookup_sequence, lookup_pooled and pooled_weights_grad."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .checks import Checker
from .sums import lane_sums, list_positions, segment_sums


def lookup_sequence(weights: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Reads the row of each lookup; see op_kernels/lookup_sequence/README.md."""
    check = Checker("lookup_sequence", weights)
    check.tensor("weights", weights, weights.dtype, 2)
    check.tensor("slots", slots, torch.int32, 1)
    check.weights(weights)
    check.vector("slots", slots, torch.int32)
    return _look_up(check, weights, slots)


def _look_up(check: Checker, weights: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return weights.index_select(0, check.indices("slots", slots, weights.shape[0])).float()


def lookup_pooled(
    weights: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
    columns: torch.Tensor,
    mean: torch.Tensor,
    first_bag: int,
    out: torch.Tensor,
) -> None:
    """Pools the rows of each bag into `out`; see op_kernels/lookup_pooled/README.md."""
    check = Checker("lookup_pooled", weights)
    check.weights(weights)
    check.vector("slots", slots, torch.int32)
    bags = PooledArguments(slots.shape[0], weights.shape[1], offsets, per_sample_weights, columns, mean, first_bag, out)
    pool(bags, bags.check(check), _look_up(check, weights, slots))


class PooledArguments(NamedTuple):
    """The arguments of a pooled lookup that describe its bags and its output, under the names in the schema.

    Attributes:
        lookups: the number of lookups.
        dim: the number of columns of a row.
    """

    lookups: int
    dim: int
    offsets: torch.Tensor
    per_sample_weights: torch.Tensor | None
    columns: torch.Tensor
    mean: torch.Tensor
    first_bag: int
    out: torch.Tensor

    def check(self, check: Checker) -> tuple[torch.Tensor, list[int]]:
        """Checks the arguments; returns the offsets as int64, and the first output column of each feature."""
        if self.per_sample_weights is not None:
            check.vector("per_sample_weights", self.per_sample_weights, torch.float32, self.lookups)
        check.matrix("out", self.out)
        check.bags(self.offsets, self.columns, self.mean, self.first_bag, self.out.shape[0])
        ends = check.offsets("offsets", self.offsets, self.lookups)
        return ends, check.slices(self.columns, self.dim, self.out.shape[1])


def pool(arguments: PooledArguments, checked: tuple[torch.Tensor, list[int]], terms: torch.Tensor) -> None:
    """Pools `terms`, float32 `[lookups, dim]`, by bag, and writes each bag to its place in `arguments.out`."""
    (ends, starts), dim, mean, first_bag, out = (
        checked,
        arguments.dim,
        arguments.mean,
        arguments.first_bag,
        arguments.out,
    )
    batch_size = out.shape[0]
    if arguments.per_sample_weights is not None:
        terms = arguments.per_sample_weights[:, None] * terms
    bags = torch.arange(first_bag, first_bag + len(ends) - 1, device=terms.device)
    pooled = segment_sums(terms, ends) / _divisors(bags, ends.diff(), mean, batch_size)[:, None]
    last_bag = first_bag + len(pooled)
    for feature, column in enumerate(starts):
        begin, end = (min(max(bag, first_bag), last_bag) for bag in (feature * batch_size, (feature + 1) * batch_size))
        if begin < end:
            samples = slice(begin - feature * batch_size, end - feature * batch_size)
            out[samples, column : column + dim] = pooled[begin - first_bag : end - first_bag]


def _divisors(bags: torch.Tensor, lengths: torch.Tensor, mean: torch.Tensor, batch_size: int) -> torch.Tensor:
    """Returns each bag's divisor, float32 `[bags]`: the bag's length if it is pooled by mean and not empty, else 1."""
    if len(bags) == 0:
        return lengths.float()
    divides = mean[bags // batch_size] & (lengths > 0)
    return torch.where(divides, lengths, 1).float()


def pooled_weights_grad(
    weights: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor,
    grad: torch.Tensor,
    columns: torch.Tensor,
    mean: torch.Tensor,
) -> torch.Tensor:
    """Computes the gradient of per-sample weights; see op_kernels/pooled_weights_grad/README.md."""
    check = Checker("pooled_weights_grad", weights)
    check.tensor("slots", slots, torch.int32, 1)
    check.weights(weights)
    check.vector("slots", slots, torch.int32)
    check.matrix("grad", grad)
    batch_size, dim = grad.shape[0], weights.shape[1]
    check.bags(offsets, columns, mean, 0, batch_size)
    ends = check.offsets("offsets", offsets, slots.shape[0])
    check.slices(columns, dim, grad.shape[1])
    rows = _look_up(check, weights, slots)
    if len(rows) == 0:
        return rows.new_empty((0,))
    lengths = ends.diff()
    bags, _ = list_positions(lengths)
    span = columns[bags // batch_size][:, None] + torch.arange(dim, device=rows.device)
    dots = lane_sums(grad[(bags % batch_size)[:, None], span] * rows)[:, 0]
    all_bags = torch.arange(len(lengths), device=rows.device)
    return dots / _divisors(all_bags, lengths, mean, batch_size)[bags]
