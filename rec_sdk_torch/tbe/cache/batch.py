"""A batch of ids in host memory, as the planner reads it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..config.lifecycle import NO_SIGNALS, IdSignalArrays, IdSignals

Int64Array = npt.NDArray[np.int64]
IntArray = npt.NDArray[np.signedinteger[Any]]
"""int32 or int64."""


_INTEGERS = (torch.int32, torch.int64)


def _same_numbers(a: IntArray, b: IntArray) -> bool:
    one, other = a.__array_interface__, b.__array_interface__
    return one == other or np.array_equal(a, b)


def meta_error(name: str) -> ValueError:
    """Returns the error to raise for a batch whose tensor `name` is on the meta device."""
    return ValueError(
        f"the batch's {name} are on the meta device, where tensors have no values: a table can be read only by ids on "
        "the CPU or on a device"
    )


def _to_host(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        raise meta_error(name)
    return tensor.cpu()


def padded_offset_indices(sizes: torch.Tensor) -> torch.Tensor:
    """Returns indices into offsets that pad features of different batch sizes to one batch size.

    In `offsets[indices]`, empty bags follow the bags of each feature, up to the largest batch size.

    Args:
        sizes: the batch size of each feature, int64 `[F]`; not empty.

    Returns:
        int64 `[F * max(sizes) + 1]`.
    """
    ends = sizes.cumsum(0)
    within = torch.arange(int(sizes.max()), device=sizes.device)[None, :].minimum(sizes[:, None])
    return torch.cat([((ends - sizes)[:, None] + within).reshape(-1), ends[-1:]])


@dataclass(eq=False)
class Batch:
    """Ids of K keys times B samples, key-major, in host memory.

    Attributes:
        values: int32 or int64 `[n]`.
        offsets: int32 or int64 `[K * B + 1]`; bag (k, b) is `values[offsets[k * B + b] : offsets[k * B + b + 1]]`.
        batch_size: B.
        feature_keys: int64 `[F]`, the key that each feature of the embedding reads.
        weights: float32 `[n]`, the per-sample weights, contiguous on the compute device; None: there are none.
        copied: whether the ids were copied from a device to the host for planning.
        weighted: whether the batch has per-sample weights, or will get them for its lookup.
        joined: whether the rows of all features of a sequence group form one output with one gradient.
        signals: shows, clicks and timestamps of the lookups.
        parent: the batch that these lookups were selected from; None: the caller passed this batch.
        kept_lookups: int64 `[n]`, indices of these lookups in `parent`, in the order of the features; None: all.
    """

    values: IntArray
    offsets: IntArray
    batch_size: int
    feature_keys: Int64Array
    weights: torch.Tensor | None = None
    copied: bool = False
    weighted: bool = False
    joined: bool = False
    signals: IdSignalArrays = NO_SIGNALS
    parent: Batch | None = None
    kept_lookups: Int64Array | None = None

    @classmethod
    def from_tensors(
        cls,
        values: torch.Tensor,
        offsets: torch.Tensor,
        batch_size: int,
        feature_keys: Int64Array,
        weights: torch.Tensor | None = None,
        weighted: bool | None = None,
        joined: bool = False,
        signals: IdSignals | None = None,
    ) -> Batch:
        """Creates a batch from tensors; ids and offsets on a device are copied to the host.

        Args:
            values: ids, int32 or int64 `[n]`.
            offsets: int32 or int64 `[K * B + 1]`.
            batch_size: B.
            feature_keys: int64 `[F]`, the key that each feature reads.
            weights: per-sample weights, `[n]`.
            weighted: whether the lookup will have weights; None: it will if `weights` are passed.
            joined: see the attribute `joined`.
            signals: shows, clicks and timestamps of the lookups.

        Raises:
            TypeError: ids or offsets are neither int32 nor int64.
            ValueError: the shapes do not match, or a tensor is on the meta device.
        """
        if values.dim() != 1 or offsets.dim() != 1:
            raise ValueError(f"ids and offsets must be flat, got shapes {values.shape} and {offsets.shape}")
        if weights is not None and weights.shape != values.shape:
            raise ValueError(f"{weights.numel()} per-sample weights for {values.numel()} ids")
        if weights is not None:
            weights = weights.to(dtype=torch.float32).contiguous()
        for name, tensor in (("ids", values), ("offsets", offsets)):
            if tensor.dtype not in _INTEGERS:
                raise TypeError(f"{name} are {tensor.dtype}, expected torch.int32 or torch.int64")
        ids: IntArray = (values if values.is_cpu else _to_host("ids", values)).numpy()
        bags: IntArray = (offsets if offsets.is_cpu else _to_host("offsets", offsets)).numpy()
        weighted = weights is not None if weighted is None else weighted
        arrays = NO_SIGNALS if signals is None else signals.arrays(len(ids))
        return cls(ids, bags, batch_size, feature_keys, weights, not values.is_cpu, weighted, joined, arrays)

    def same_plan(self, other: Batch) -> bool:
        """Returns whether a plan of this batch can be used for `other`: everything that the planner reads is equal."""
        if (self.batch_size, self.weighted, self.joined) != (other.batch_size, other.weighted, other.joined):
            return False
        if self.signals is not other.signals and not self.signals.same(other.signals):
            return False
        return (
            _same_numbers(self.offsets, other.offsets)
            and _same_numbers(self.feature_keys, other.feature_keys)
            and _same_numbers(self.values, other.values)
        )

    @property
    def is_well_formed(self) -> bool:
        """Whether the offsets begin with 0, end with the number of ids and never decrease."""
        offsets = self.offsets
        if not self.batch_size or offsets[0] or offsets[-1] != len(self.values):
            return False
        return bool((np.diff(offsets) >= 0).all())

    @property
    def original(self) -> Batch:
        """The batch that the caller passed: `parent`, or this batch if nothing was left out."""
        return self.parent or self

    def select(self, mask: npt.NDArray[np.bool_]) -> Batch:
        """Returns a batch of the lookups whose `mask` is True, feature by feature; the batch itself if all are True.

        Args:
            mask: bool `[n]`, over the lookups in the order of the features. The batch must be well formed.
        """
        if mask.all() and len(mask) == len(self.values):
            return self
        features = np.arange(len(self.feature_keys))
        kept, order = np.flatnonzero(mask), self.lookup_order(features)
        kept_before = np.concatenate([[0], np.cumsum(mask)])
        indices = kept if order is None else order[kept]
        weights = self.weights
        if weights is not None:
            weights = weights.index_select(0, torch.from_numpy(indices).to(weights.device))
        return replace(
            self,
            values=self.values[indices],
            offsets=kept_before[self.repacked_offsets(features)],
            feature_keys=features,
            weights=weights,
            signals=self.signals.part(indices, self.feature_keys),
            parent=self,
            kept_lookups=kept,
        )

    @cached_property
    def _starts(self) -> Int64Array:
        # A slice never raises an error: the planner reports offsets of a wrong length with a better message.
        borders = self.offsets[:: self.batch_size] if self.batch_size else np.zeros(1, self.offsets.dtype)
        return borders.astype(np.int64)

    def lookup_counts(self, features: Int64Array) -> Int64Array:
        """Returns the number of lookups of each of `features`, int64 `[F]`."""
        if not self.batch_size:
            return np.zeros(len(features), np.int64)
        ends, keys = self.offsets[:: self.batch_size], self.feature_keys[features]
        return (ends[keys + 1] - ends[keys]).astype(np.int64)

    def repacked_offsets(self, features: Int64Array) -> Int64Array:
        """Returns the offsets of the bags of `features`, feature-major, int64 `[F * B + 1]`."""
        first = self.feature_keys[features][:, None] * self.batch_size + np.arange(self.batch_size)
        lengths = (self.offsets[first + 1] - self.offsets[first]).ravel()
        return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

    def lookup_order(self, features: Int64Array) -> Int64Array | None:
        """Returns the index in `values` of each lookup of `features`, int64 `[n]`; None for the identity."""
        if not self.batch_size:
            return None
        keys = self.feature_keys[features]
        lengths = self.lookup_counts(features)
        if self._starts[0] or self._starts[-1] != len(self.values) or (np.diff(self._starts) < 0).any():
            return None  # the offsets are invalid; the planner reports the error
        starts = self._starts[keys]
        before = np.cumsum(lengths) - lengths
        if np.array_equal(starts, before) and lengths.sum() == len(self.values):
            return None
        source: Int64Array = np.arange(lengths.sum()) + np.repeat(starts - before, lengths)
        return source
