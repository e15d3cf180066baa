"""Conversion of FBGEMM's batches: feature order, batch sizes per feature, and repair of invalid offsets."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..tbe import Int64Array, padded_offset_indices

BatchSizes = Sequence[Sequence[int]]
"""`batch_size_per_feature_per_rank`: for each feature the batch size of each rank."""


class FeatureOrder:
    """Mapping between the two orders of features: batch order and table order.

    Batch order is the order of `feature_table_map`. In table order, the features of one table are adjacent.

    Attributes:
        features: number of features of each table.
        keys, key_array: index in the batch of each feature, in table order.
        same: whether both orders are the same.
    """

    def __init__(self, feature_table_map: Sequence[int] | None, dims: Sequence[int]) -> None:
        """Computes batch order and table order.

        Raises:
            ValueError: a feature has no table, or a table has no feature.
        """
        tables = range(len(dims))
        self.map = list(tables if feature_table_map is None else feature_table_map)
        if set(self.map) != set(tables):
            raise ValueError(
                f"feature_table_map is {self.map}: each of the {len(dims)} tables needs a feature, and no other has one"
            )
        self.features = [self.map.count(table) for table in tables]
        self.keys = sorted(range(len(self.map)), key=lambda feature: self.map[feature])
        self.key_array: Int64Array = np.array(self.keys, np.int64)
        self.same = self.keys == list(range(len(self.map)))
        self.dims = [dims[table] for table in self.map]
        self._columns: torch.Tensor | None = None

    def column_indices(self, device: torch.device) -> torch.Tensor:
        """Returns the column in the table-order output for each column in the batch-order output.

        The tensor is int64 `[sum of dims]`.
        """
        if self._columns is None or self._columns.device != device:
            of_key, begin = {}, 0
            for key in self.keys:
                of_key[key] = torch.arange(begin, begin + self.dims[key], device="cpu")
                begin += self.dims[key]
            self._columns = torch.cat([of_key[key] for key in range(len(self.map))]).to(device)
        return self._columns


class _WriteInto(torch.autograd.Function):
    """Autograd function that writes an output to the caller's memory.

    The memory is not part of the autograd graph, so the caller may reuse it in the next step.
    """

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, positions: torch.Tensor, memory: list[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(positions)
        return memory[0].index_copy_(0, positions, output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (positions,) = ctx.saved_tensors
        return grads[0].reshape(-1).index_select(0, positions), None, None


class VariableBatch:
    """A batch with a batch size for each feature and rank.

    The tables look up a padded batch: every feature has the largest batch size, filled up with empty bags. FBGEMM's
    output contains the rows `[b, D]` of each rank and each feature, flattened and concatenated.

    Attributes:
        batch_size: batch size of the padded batch, which is the largest sum of a feature's batch sizes over all ranks.
    """

    def __init__(self, sizes: BatchSizes, dims: Sequence[int]) -> None:
        """Validates the batch sizes.

        Raises:
            ValueError: there are not as many sizes as features, or their numbers of ranks differ.
        """
        ranks = {len(of_feature) for of_feature in sizes}
        if len(sizes) != len(dims) or len(ranks) != 1:
            raise ValueError(
                f"batch_size_per_feature_per_rank has {len(sizes)} features with {sorted(ranks)} ranks, expected "
                f"{len(dims)} features, all with the same number of ranks"
            )
        self._sizes = torch.tensor([list(of_feature) for of_feature in sizes], dtype=torch.int64, device="cpu")
        self._dims = list(dims)
        self.of_features = self._sizes.sum(1)
        self.batch_size = int(self.of_features.max())

    @functools.cached_property
    def _offset_indices(self) -> torch.Tensor:
        """Indices into the batch's own offsets, one for each entry of the padded offsets."""
        return padded_offset_indices(self.of_features)

    def offsets(self, offsets: torch.Tensor) -> torch.Tensor:
        """Returns the offsets of the padded batch, `[F * B + 1]`.

        Raises:
            ValueError: the number of offsets is not the number of bags plus 1.
        """
        bags = int(self.of_features.sum())
        if offsets.numel() != bags + 1:
            raise ValueError(
                f"offsets has {offsets.numel()} entries, expected {bags} + 1, by batch_size_per_feature_per_rank"
            )
        return offsets.index_select(0, self._offset_indices.to(offsets.device))

    def feature_bounds(self, offsets: torch.Tensor) -> torch.Tensor:
        """Returns the index of each feature's first lookup, and the end of the last feature's lookups, `[F + 1]`."""
        ends = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), self.of_features.cumsum(0)])
        return offsets.index_select(0, ends.to(offsets.device))

    def output(self, padded: torch.Tensor) -> torch.Tensor:
        """Returns FBGEMM's flat output, gathered from `padded`, the padded batch's output `[B, sum of dims]`."""
        return padded.reshape(-1).index_select(0, self._output_indices.to(padded.device))

    def place_rows(self, output: torch.Tensor, offsets: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Writes FBGEMM's output to `memory` and returns it flat.

        The rows of rank r and feature f start at `offsets[r][f]`.

        Raises:
            ValueError: `offsets` or `memory` has a wrong shape, size, data type or device.
        """
        lengths = (self._sizes * torch.tensor(self._dims, device="cpu")[:, None]).t()
        begins = offsets.cpu().long()
        if begins.shape != lengths.shape or int(begins.min()) < 0 or int((begins + lengths).max()) > memory.numel():
            raise ValueError(
                f"vbe_output of {memory.numel()} elements and vbe_output_offsets of shape {tuple(offsets.shape)}, "
                f"expected offsets of shape {tuple(lengths.shape)} whose rows lie in it"
            )
        if memory.dtype != output.dtype or memory.device != output.device:
            raise ValueError(
                f"vbe_output is {memory.dtype} on {memory.device}, the output {output.dtype} on {output.device}"
            )
        flat = lengths.reshape(-1)
        moved = (begins.reshape(-1) - (flat.cumsum(0) - flat)).repeat_interleave(flat)
        positions = torch.arange(output.numel(), device="cpu") + moved
        placed: torch.Tensor = _WriteInto.apply(output, positions.to(memory.device), [memory.detach().view(-1)])
        return placed

    @functools.cached_property
    def _output_indices(self) -> torch.Tensor:
        """Indices into the flattened padded output, int64, one for each element of FBGEMM's flat output."""
        width = sum(self._dims)
        begins = (self._sizes.cumsum(1) - self._sizes).tolist()
        sizes, parts = self._sizes.tolist(), [torch.empty(0, dtype=torch.int64, device="cpu")]
        for rank in range(self._sizes.shape[1]):
            column = 0
            for feature, dim in enumerate(self._dims):
                rows = torch.arange(sizes[feature][rank], device="cpu") + begins[feature][rank]
                columns = torch.arange(column, column + dim, device="cpu")
                parts.append((rows[:, None] * width + columns[None, :]).reshape(-1))
                column += dim
        return torch.cat(parts)


def mask_weight_gradients(
    weights: torch.Tensor, feature_requires_grad: torch.Tensor, feature_bounds: torch.Tensor
) -> torch.Tensor:
    """Returns the per-sample weights, detached for features whose entry in `feature_requires_grad`, `[F]`, is 0.

    Raises:
        ValueError: `feature_requires_grad` does not have one entry per feature.
    """
    if feature_requires_grad.numel() != feature_bounds.numel() - 1:
        raise ValueError(
            f"feature_requires_grad has {feature_requires_grad.numel()} entries, expected one per feature "
            f"({feature_bounds.numel() - 1})"
        )
    lengths = feature_bounds.diff().to(weights.device)
    requires_grad = (
        feature_requires_grad.to(weights.device).bool().repeat_interleave(lengths, output_size=weights.numel())
    )
    return torch.where(requires_grad, weights, weights.detach())


def repair_batch(
    indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
    """Returns the batch with invalid offsets repaired, as FBGEMM's bounds check does; None if all are valid.

    The last offset is set to the number of ids; the others are clamped to 0 and that number and made non-decreasing.
    Ids before the first offset are in no bag and are removed.
    """
    long_offsets = offsets.cpu().long()
    count = indices.numel()
    if not long_offsets.numel():
        return None
    fixed = long_offsets.clone()
    fixed[-1] = count
    fixed = fixed.clamp(0, count).cummax(0).values
    begin = int(fixed[0])
    if begin == 0 and torch.equal(fixed, long_offsets):
        return None
    return indices[begin:], fixed - begin, None if weights is None else weights[begin:]
