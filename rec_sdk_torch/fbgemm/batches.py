"""FBGEMM's batches as the tables read them: the order of features, batch sizes per feature, offsets that are wrong."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..tbe import Int64Array, padded_offset_indices

BatchSizes = Sequence[Sequence[int]]
"""`batch_size_per_feature_per_rank`: of each feature the batch size of each rank."""


class FeatureOrder:
    """Where features are: in a batch in the order of `feature_table_map`, in the tables each beside those of its table.

    Attributes:
        features: of each table, how many look it up.
        keys, key_array: for each feature of the tables the one of the batch.
        same: both orders are one.
    """

    def __init__(self, feature_table_map: Sequence[int] | None, dims: Sequence[int]) -> None:
        """
        Raises:
            ValueError: a feature of no table, or a table without a feature.
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

    def columns(self, device: torch.device) -> torch.Tensor:
        """For each column of the batch's output that of the tables' output, int64 `[sum of dims]`."""
        if self._columns is None or self._columns.device != device:
            of_key, begin = {}, 0
            for key in self.keys:
                of_key[key] = torch.arange(begin, begin + self.dims[key], device="cpu")
                begin += self.dims[key]
            self._columns = torch.cat([of_key[key] for key in range(len(self.map))]).to(device)
        return self._columns


class _WriteInto(torch.autograd.Function):
    """Writes an output to the caller's memory, which has no part in the graph: the next step may use it again."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, places: torch.Tensor, memory: list[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(places)
        return memory[0].index_copy_(0, places, output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (places,) = ctx.saved_tensors
        return grads[0].reshape(-1).index_select(0, places), None, None


class VariableBatch:
    """A batch size of each feature and rank.

    The tables look up a batch of the largest size, in which features have empty bags behind their own; FBGEMM's
    output has of each rank the rows `[b, D]` of each feature, flat and one behind the other.

    Attributes:
        batch_size: the largest of a feature.
    """

    def __init__(self, sizes: BatchSizes, dims: Sequence[int]) -> None:
        """
        Raises:
            ValueError: sizes that do not fit the features.
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
    def _places(self) -> torch.Tensor:
        """For each entry of the padded offsets, the place of the batch's own."""
        return padded_offset_indices(self.of_features)

    def offsets(self, offsets: torch.Tensor) -> torch.Tensor:
        """Offsets of the padded batch, `[F * B + 1]`.

        Raises:
            ValueError: another number of offsets than the sizes have.
        """
        bags = int(self.of_features.sum())
        if offsets.numel() != bags + 1:
            raise ValueError(
                f"offsets has {offsets.numel()} entries, expected {bags} + 1, by batch_size_per_feature_per_rank"
            )
        return offsets.index_select(0, self._places.to(offsets.device))

    def feature_bounds(self, offsets: torch.Tensor) -> torch.Tensor:
        """Where the lookups of each feature begin, and the last end, `[F + 1]`."""
        ends = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), self.of_features.cumsum(0)])
        return offsets.index_select(0, ends.to(offsets.device))

    def output(self, padded: torch.Tensor) -> torch.Tensor:
        """FBGEMM's output, flat, from that of the padded batch, `[B, sum of dims]`."""
        return padded.reshape(-1).index_select(0, self._elements.to(padded.device))

    def write_into(self, output: torch.Tensor, offsets: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """`given`, flat, in which the rows of rank r and feature f of FBGEMM's output begin at `offsets[r][f]`.

        Raises:
            ValueError: tensors that do not fit the sizes or the output.
        """
        lengths = (self._sizes * torch.tensor(self._dims, device="cpu")[:, None]).t()
        begins = offsets.cpu().long()
        if begins.shape != lengths.shape or int(begins.min()) < 0 or int((begins + lengths).max()) > given.numel():
            raise ValueError(
                f"vbe_output of {given.numel()} elements and vbe_output_offsets of shape {tuple(offsets.shape)}, "
                f"expected offsets of shape {tuple(lengths.shape)} whose rows lie in it"
            )
        if given.dtype != output.dtype or given.device != output.device:
            raise ValueError(
                f"vbe_output is {given.dtype} on {given.device}, the output {output.dtype} on {output.device}"
            )
        flat = lengths.reshape(-1)
        moved = (begins.reshape(-1) - (flat.cumsum(0) - flat)).repeat_interleave(flat)
        places = torch.arange(output.numel(), device="cpu") + moved
        placed: torch.Tensor = _WriteInto.apply(output, places.to(given.device), [given.detach().view(-1)])
        return placed

    @functools.cached_property
    def _elements(self) -> torch.Tensor:
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
    """Per-sample weights with no gradient for features whose entry of `feature_requires_grad`, `[F]`, is 0.

    Raises:
        ValueError: another number of entries than of features.
    """
    if feature_requires_grad.numel() != feature_bounds.numel() - 1:
        raise ValueError(
            f"feature_requires_grad has {feature_requires_grad.numel()} entries, expected one per feature "
            f"({feature_bounds.numel() - 1})"
        )
    lengths = feature_bounds.diff().to(weights.device)
    wanted = feature_requires_grad.to(weights.device).bool().repeat_interleave(lengths, output_size=weights.numel())
    return torch.where(wanted, weights, weights.detach())


def repair_batch(
    indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
    """The batch as FBGEMM's bounds check reads it: offsets within the ids, none below the one before, the last at the
    end, and ids before the first in no bag. None where its offsets are in order.
    """
    given = offsets.cpu().long()
    count = indices.numel()
    if not given.numel():
        return None
    fixed = given.clone()
    fixed[-1] = count
    fixed = fixed.clamp(0, count).cummax(0).values
    begin = int(fixed[0])
    if begin == 0 and torch.equal(fixed, given):
        return None
    return indices[begin:], fixed - begin, None if weights is None else weights[begin:]
