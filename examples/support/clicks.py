"""A click log in memory, its split, and its batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from support.errors import InputError

SMALLEST_LOG = 10  # a tenth of the log must be at least one row


@dataclass(frozen=True)
class JaggedIds:
    """The ids of one feature, any number for each sample."""

    values: Tensor  # int64 [total ids]
    lengths: Tensor  # int64 [samples]

    @staticmethod
    def single(values: Tensor) -> JaggedIds:
        """Returns a feature with one id for each sample."""
        return JaggedIds(values, torch.ones_like(values))

    def select(self, samples: Tensor) -> JaggedIds:
        """Returns the ids of the given samples (int64), in this order."""
        lengths = self.lengths[samples]
        starts = (torch.cumsum(self.lengths, 0) - self.lengths)[samples]
        new_starts = torch.cumsum(lengths, 0) - lengths
        within = torch.arange(int(lengths.sum())) - new_starts.repeat_interleave(lengths)
        return JaggedIds(self.values[starts.repeat_interleave(lengths) + within], lengths)


@dataclass(frozen=True)
class ClickBatch:
    """A batch of clicks. Its ids stay on the host, where the tables plan their swaps."""

    dense: Tensor  # float32 [B, dense features]
    sparse: KeyedJaggedTensor
    labels: Tensor  # float32 [B]

    def to(self, device: torch.device, non_blocking: bool = False) -> ClickBatch:
        """Returns a copy on a device. Train pipelines call it ahead of time."""
        parts = (part.to(device, non_blocking=non_blocking) for part in (self.dense, self.sparse, self.labels))
        return ClickBatch(*parts)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the memory until the stream has read it."""
        for part in (self.dense, self.sparse, self.labels):
            part.record_stream(stream)


@dataclass(frozen=True)
class ClickData:
    """A click log, column by column."""

    dense: Tensor  # float32 [samples, dense features]
    features: Mapping[str, JaggedIds]
    labels: Tensor  # float32 [samples], 0 or 1

    def __len__(self) -> int:
        return self.labels.numel()

    def select(self, samples: Tensor) -> ClickData:
        """Returns the given samples (int64), in this order."""
        features = {name: ids.select(samples) for name, ids in self.features.items()}
        return ClickData(self.dense[samples], features, self.labels[samples])

    def batch(self) -> ClickBatch:
        """Returns the whole log as one batch."""
        ids = self.features.values()
        sparse = KeyedJaggedTensor(
            keys=list(self.features),
            values=torch.cat([feature.values for feature in ids]),
            lengths=torch.cat([feature.lengths for feature in ids]),
        )
        return ClickBatch(self.dense, sparse, self.labels)

    def batches(self, batch_size: int, order: Tensor | None = None) -> Iterator[ClickBatch]:
        """Yields every sample once, in the given order, in batches. The last one may be smaller."""
        order = torch.arange(len(self)) if order is None else order
        for samples in torch.split(order, batch_size):
            yield self.select(samples).batch()

    def longest(self, feature: str) -> int:
        """Returns the largest number of ids that any sample has for a feature."""
        return int(self.features[feature].lengths.max())

    def vocabularies(self) -> dict[str, Tensor]:
        """Returns the distinct ids of each feature, ascending."""
        return {name: torch.unique(ids.values) for name, ids in self.features.items()}

    def with_dense_ids(self, vocabularies: Mapping[str, Tensor]) -> ClickData:
        """Returns the same log with every id replaced by its index in the feature's vocabulary."""
        features = {
            name: JaggedIds(torch.searchsorted(vocabularies[name], ids.values), ids.lengths)
            for name, ids in self.features.items()
        }
        return replace(self, features=features)


@dataclass(frozen=True)
class Split:
    """The samples (int64 indices) for training, validation and test."""

    train: Tensor
    validation: Tensor
    test: Tensor


def _cut(order: Tensor) -> Split:
    if order.numel() < SMALLEST_LOG:
        raise InputError(f"{order.numel()} rows are too few to split; at least {SMALLEST_LOG} are needed")
    tenth = order.numel() // 10
    return Split(order[: -2 * tenth], order[-2 * tenth : -tenth], order[-tenth:])


def random_split(samples: int, seed: int) -> Split:
    """Splits at random, by the seed, into 80 / 10 / 10 percent."""
    return _cut(torch.randperm(samples, generator=torch.Generator().manual_seed(seed)))


def ordered_split(samples: int) -> Split:
    """Splits in order into 80 / 10 / 10 percent: a log in order of time is tested on its last samples."""
    return _cut(torch.arange(samples))
