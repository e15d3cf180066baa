"""A batch as the planner reads it."""

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
    """Returns the error of a batch whose tensor `name` is on the meta device."""
    return ValueError(
        f"the batch's {name} are on the meta device, where tensors have no values: a table can be read only by ids on "
        "the CPU or on a device"
    )


def _to_host(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        raise meta_error(name)
    return tensor.cpu()


def padded_offset_indices(sizes: torch.Tensor) -> torch.Tensor:
    """The places of padded offsets among the offsets of a batch whose features have batch sizes of their own.

    Features have empty bags behind their own, up to the largest size.

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
        feature_keys: int64 `[F]`, for each feature of the embedding the key it reads.
        weights: float32 `[n]` without gaps on the compute device, the per-sample weights, or None.
        copied: the ids came from a device and were copied back for planning.
        weighted: there are per-sample weights, or there will be when the batch is looked up.
        joined: the rows of all features of a sequence group are one output, and have one gradient.
        signals: what is known of the lookups beside their ids.
        parent: the batch that this one is a part of; None where it is the whole.
        kept_lookups: int64 `[n]`, the lookups of `parent` that this batch has, in the order of the features; None: all.
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
        """A batch of tensors, copied to the host where they are not there yet.

        Raises:
            TypeError: ids or offsets that are neither int32 nor int64.
            ValueError: shapes that do not fit each other; a tensor on the meta device.
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
        known = NO_SIGNALS if signals is None else signals.arrays(len(ids))
        return cls(ids, bags, batch_size, feature_keys, weights, not values.is_cpu, weighted, joined, known)

    def same_plan(self, other: Batch) -> bool:
        """Whether one plan serves both."""
        mine = self.batch_size, self.weighted, self.joined
        if mine != (other.batch_size, other.weighted, other.joined):
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
        """Whether its offsets are those of its values, as far as bags go by them."""
        offsets = self.offsets
        if not self.batch_size or offsets[0] or offsets[-1] != len(self.values):
            return False
        return bool((np.diff(offsets) >= 0).all())

    @property
    def original(self) -> Batch:
        """The batch that this one is a part of, or itself."""
        return self.parent or self

    def select(self, chosen: npt.NDArray[np.bool_]) -> Batch:
        """The batch with some of its lookups, feature by feature; the batch itself where it has no others.

        Args:
            chosen: bool `[n]`, of the lookups in the order of the features. The batch is well formed.
        """
        if chosen.all() and len(chosen) == len(self.values):
            return self
        features = np.arange(len(self.feature_keys))
        kept, order = np.flatnonzero(chosen), self.lookup_order(features)
        before = np.concatenate([[0], np.cumsum(chosen)])
        places = kept if order is None else order[kept]
        weights = self.weights
        if weights is not None:
            weights = weights.index_select(0, torch.from_numpy(places).to(weights.device))
        return replace(
            self,
            values=self.values[places],
            offsets=before[self.bag_offsets(features)],
            feature_keys=features,
            weights=weights,
            signals=self.signals.part(places, self.feature_keys),
            parent=self,
            kept_lookups=kept,
        )

    @cached_property
    def _starts(self) -> Int64Array:
        # An offsets array of the wrong length is the planner's to report, with a better message than an index's.
        borders = self.offsets[:: self.batch_size] if self.batch_size else np.zeros(1, self.offsets.dtype)
        return borders.astype(np.int64)

    def lookup_counts(self, features: Int64Array) -> Int64Array:
        """Lookups of each of `features`."""
        if not self.batch_size:
            return np.zeros(len(features), np.int64)
        begins = self.feature_keys[features] * self.batch_size
        return (self.offsets[begins + self.batch_size] - self.offsets[begins]).astype(np.int64)

    def bag_offsets(self, features: Int64Array) -> Int64Array:
        """Offsets of the bags of `features`, one behind the other, int64 `[F * B + 1]`."""
        first = self.feature_keys[features][:, None] * self.batch_size + np.arange(self.batch_size)
        lengths = (self.offsets[first + 1] - self.offsets[first]).ravel()
        return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

    def lookup_order(self, features: Int64Array) -> Int64Array | None:
        """Where each lookup of `features` is in `values`, int64 `[n]`; None when they are all of them in order."""
        if not self.batch_size:
            return None
        keys = self.feature_keys[features]
        lengths = self.lookup_counts(features)
        if self._starts[0] or self._starts[-1] != len(self.values) or (np.diff(self._starts) < 0).any():
            return None  # the planner says what is wrong with these offsets
        starts = self._starts[keys]
        before = np.cumsum(lengths) - lengths
        if np.array_equal(starts, before) and lengths.sum() == len(self.values):
            return None
        source: Int64Array = np.arange(lengths.sum()) + np.repeat(starts - before, lengths)
        return source
