"""The bags of a KeyedJaggedTensor, whose keys may have batch sizes of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from ..tbe.cache.batch import Batch
from ..tbe.cache.padding import padded_places


@dataclass(eq=False, slots=True)
class Bags:
    """A batch as the tables look it up: with one batch size.

    Attributes:
        features: the batch.
        offsets: int32 or int64 `[K * B + 1]`.
        size: B, the largest batch size of a key.
        sizes: of each key its own.
    """

    features: KeyedJaggedTensor
    offsets: torch.Tensor
    size: int
    sizes: list[int]

    @classmethod
    def of(cls, features: KeyedJaggedTensor) -> Bags:
        """
        Raises:
            ValueError: lengths that do not fit the keys.
        """
        offsets, keys = features.offsets(), len(features.keys())
        sizes = features.stride_per_key() if features.variable_stride_per_key() else [features.stride()] * keys
        if offsets.numel() != sum(sizes) + 1:
            of_keys = f"{keys} keys have batch sizes {sizes}"
            if len(set(sizes)) == 1:
                of_keys = f"expected its keys ({keys}) times {sizes[0]} samples"
            raise ValueError(f"the batch has {offsets.numel() - 1} lengths, {of_keys}")
        if len(set(sizes)) <= 1:
            return cls(features, offsets, sizes[0] if sizes else 0, sizes)
        places = padded_places(torch.tensor(sizes, device="cpu")).to(offsets.device)
        return cls(features, offsets.index_select(0, places), max(sizes), sizes)

    def lengths(self, key: int, lengths: torch.Tensor) -> torch.Tensor:
        """The lengths of a key, by its place, among `lengths` of all keys."""
        begin = sum(self.sizes[:key])
        return lengths[begin : begin + self.sizes[key]]

    def sequences(
        self, names: Sequence[str], batch: Batch, rows: Sequence[torch.Tensor], need_indices: bool
    ) -> dict[str, JaggedTensor]:
        """The rows of each output, with the lengths of its key.

        Args:
            names: of the outputs.
            batch: of these bags, as it was given.
            rows: of each output float32 `[n_f, D]`.
            need_indices: the ids are the outputs' weights.
        """
        device, size = rows[0].device, batch.batch_size
        lengths = self.features.lengths().to(device)
        ids = self.features.values().to(device) if need_indices else None
        result = {}
        for name, key, part in zip(names, batch.feature_keys.tolist(), rows, strict=True):
            begin = int(batch.offsets[key * size])
            own = None if ids is None else ids[begin : begin + len(part)]
            result[name] = JaggedTensor(values=part, lengths=self.lengths(key, lengths), weights=own)
        return result

    def check_pooled(self) -> None:
        """
        Raises:
            ValueError: keys have several batch sizes, and nothing says the bag of each sample.
        """
        if len(set(self.sizes)) > 1 and self.features.inverse_indices_or_none() is None:
            sizes = dict(zip(self.features.keys(), self.sizes, strict=True))
            raise ValueError(
                f"the keys of the batch have batch sizes {sizes}: pooled outputs need inverse_indices, which say for "
                "each sample the bag of each key"
            )

    def expand(self, values: torch.Tensor, dims: Sequence[int], keys: Sequence[int]) -> torch.Tensor:
        """Pooled outputs of samples from those of bags.

        Args:
            values: float32 `[B, sum(dims)]`.
            dims, keys: of each output its D, and the place of its key.

        Returns:
            float32 `[samples, sum(dims)]`: by `inverse_indices`, if the batch has them; else `values`.

        Raises:
            ValueError: `inverse_indices` without a row for each key.
            IndexError: an index that is no bag of its key, where they are on the host.
        """
        inverse = self.features.inverse_indices_or_none()
        if inverse is None:
            return values
        names, indices = inverse
        rows = {name: row for row, name in enumerate(names)}
        wanted = [self.features.keys()[key] for key in keys]
        missing = sorted(set(wanted) - rows.keys())
        if missing or indices.dim() != 2 or len(names) != len(indices):
            raise ValueError(
                f"inverse_indices have keys {list(names)} and shape {tuple(indices.shape)}, expected [keys, samples] "
                f"with keys {wanted}"
            )
        indices = indices.to(values.device)
        parts = [
            part[: self.sizes[key]].index_select(0, indices[rows[name]])
            for part, key, name in zip(values.split(list(dims), 1), keys, wanted, strict=True)
        ]
        return torch.cat(parts, 1)
