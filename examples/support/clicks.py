"""A click log in memory, its split, and its batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from support.errors import InputError

SMALLEST_LOG = 10  # a tenth of it must be one row at least


@dataclass(frozen=True)
class JaggedIds:
    """The ids of one feature, a run of them per sample."""

    values: Tensor  # int64 [total ids]
    lengths: Tensor  # int64 [samples]

    @staticmethod
    def single(values: Tensor) -> JaggedIds:
        """One id per sample."""
        return JaggedIds(values, torch.ones_like(values))

    def select(self, samples: Tensor) -> JaggedIds:
        """The runs of the given samples (int64), in that order."""
        lengths = self.lengths[samples]
        starts = (torch.cumsum(self.lengths, 0) - self.lengths)[samples]
        new_starts = torch.cumsum(lengths, 0) - lengths
        within = torch.arange(int(lengths.sum())) - new_starts.repeat_interleave(lengths)
        return JaggedIds(self.values[starts.repeat_interleave(lengths) + within], lengths)


@dataclass(frozen=True)
class ClickBatch:
    """The clicks that a model sees at once. They stay on the host: the tables plan their swaps there."""

    dense: Tensor  # float32 [B, dense features]
    sparse: KeyedJaggedTensor
    labels: Tensor  # float32 [B]

    def to(self, device: torch.device, non_blocking: bool = False) -> ClickBatch:
        """A copy on a device, which train pipelines ask for ahead of time."""
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
        """The given samples (int64), in that order."""
        features = {name: ids.select(samples) for name, ids in self.features.items()}
        return ClickData(self.dense[samples], features, self.labels[samples])

    def batch(self) -> ClickBatch:
        """The whole log as one batch."""
        ids = self.features.values()
        sparse = KeyedJaggedTensor(
            keys=list(self.features),
            values=torch.cat([feature.values for feature in ids]),
            lengths=torch.cat([feature.lengths for feature in ids]),
        )
        return ClickBatch(self.dense, sparse, self.labels)

    def batches(self, batch_size: int, order: Tensor | None = None) -> Iterator[ClickBatch]:
        """Every sample once, in the given order; the last batch may be smaller."""
        order = torch.arange(len(self)) if order is None else order
        for samples in torch.split(order, batch_size):
            yield self.select(samples).batch()

    def longest(self, feature: str) -> int:
        """The most ids that one sample has of a feature."""
        return int(self.features[feature].lengths.max())

    def vocabularies(self) -> dict[str, Tensor]:
        """The distinct ids of each feature, ascending."""
        return {name: torch.unique(ids.values) for name, ids in self.features.items()}

    def with_dense_ids(self, vocabularies: Mapping[str, Tensor]) -> ClickData:
        """The same log with every id replaced by its place in the feature's vocabulary."""
        features = {
            name: JaggedIds(torch.searchsorted(vocabularies[name], ids.values), ids.lengths)
            for name, ids in self.features.items()
        }
        return replace(self, features=features)


@dataclass(frozen=True)
class Split:
    """Which samples (int64 indices) a model is trained, watched and judged on."""

    train: Tensor
    validation: Tensor
    test: Tensor


def _cut(order: Tensor) -> Split:
    if order.numel() < SMALLEST_LOG:
        raise InputError(f"{order.numel()} rows are too few to split; at least {SMALLEST_LOG} are needed")
    tenth = order.numel() // 10
    return Split(order[: -2 * tenth], order[-2 * tenth : -tenth], order[-tenth:])


def random_split(samples: int, seed: int) -> Split:
    """80 / 10 / 10 percent, drawn by the seed."""
    return _cut(torch.randperm(samples, generator=torch.Generator().manual_seed(seed)))


def ordered_split(samples: int) -> Split:
    """80 / 10 / 10 percent, the last ones for the test: a log in order of time is judged on its future."""
    return _cut(torch.arange(samples))
