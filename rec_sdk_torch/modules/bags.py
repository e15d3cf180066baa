"""The bags of a KeyedJaggedTensor whose keys may have different batch sizes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from ..tbe import Batch, padded_offset_indices, split_apart


@functools.cache
def _has_expected_fields() -> bool:
    """Returns whether JaggedTensor has exactly the fields that `Bags.sequences` sets; other releases may add some."""
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    return list(vars(JaggedTensor(none, lengths=none))) == ["_values", "_weights", "_lengths", "_offsets"]


_new_jagged = JaggedTensor.__new__


def _length_error(offsets: torch.Tensor, of_keys: str) -> ValueError:
    return ValueError(f"the batch has {offsets.numel() - 1} lengths, {of_keys}")


@dataclass(eq=False, slots=True)
class Bags:
    """A batch with one batch size for all keys, the form in which tables look up a batch.

    Attributes:
        features: the batch.
        offsets: int32 or int64 `[K * B + 1]`; keys with fewer than B samples are padded with empty bags.
        size: B, the largest batch size of a key.
        sizes: batch size of each key; None if all keys have B.
    """

    features: KeyedJaggedTensor
    offsets: torch.Tensor
    size: int
    sizes: list[int] | None

    @classmethod
    def of(cls, features: KeyedJaggedTensor, keys: int) -> Bags:
        """Returns the bags of a batch that has `keys` keys.

        Raises:
            ValueError: the number of lengths does not match the number of keys and their batch sizes.
        """
        offsets = features.offsets()
        if features.variable_stride_per_key():
            return cls._padded(features, offsets, keys)
        size = features.stride()
        if offsets.numel() != size * keys + 1:
            raise _length_error(offsets, f"expected its keys ({keys}) times {size} samples")
        return cls(features, offsets, size if keys else 0, None)

    @classmethod
    def _padded(cls, features: KeyedJaggedTensor, offsets: torch.Tensor, keys: int) -> Bags:
        sizes = features.stride_per_key()
        same_size = len(set(sizes)) <= 1
        if offsets.numel() != sum(sizes) + 1:
            of_keys = f"expected its keys ({keys}) times {sizes[0]} samples" if sizes and same_size else ""
            raise _length_error(offsets, of_keys or f"{keys} keys have batch sizes {sizes}")
        if same_size:
            return cls(features, offsets, sizes[0] if sizes else 0, None)
        places = padded_offset_indices(torch.tensor(sizes, device="cpu")).to(offsets.device)
        return cls(features, offsets.index_select(0, places), max(sizes), sizes)

    def sequences(
        self, names: Sequence[str], batch: Batch, rows: Sequence[torch.Tensor], need_indices: bool
    ) -> dict[str, JaggedTensor]:
        """Returns each output's rows as a JaggedTensor with the lengths of the output's key.

        Args:
            names: names of the outputs.
            batch: the planner's batch for these bags.
            rows: rows of each output, float32 `[n_f, D]`.
            need_indices: whether ids are returned as weights of the outputs.
        """
        device, keys = rows[0].device, batch.feature_keys.tolist()
        lengths = self.features.lengths().to(device)
        of_keys = split_apart(lengths, self.sizes or [self.size] * len(self.features.keys()))
        weights: Sequence[torch.Tensor | None] = [None] * len(rows)
        if need_indices:
            ids = self.features.values().to(device)
            begins = batch.offsets[batch.feature_keys * self.size].tolist()
            weights = [ids[begin : begin + len(part)] for begin, part in zip(begins, rows, strict=True)]
        outputs = zip(names, keys, rows, weights, strict=True)
        if not _has_expected_fields():
            return {name: JaggedTensor(part, weight, of_keys[key]) for name, key, part, weight in outputs}
        outputs_by_name: dict[str, JaggedTensor] = {}
        for name, key, part, weight in outputs:  # skips JaggedTensor's constructor, with its 16 calls
            outputs_by_name[name] = made = _new_jagged(JaggedTensor)
            made._values = part
            made._weights = weight
            made._lengths = of_keys[key]
            made._offsets = None
        return outputs_by_name

    def check_pooled(self) -> None:
        """Raises an error if the samples to which pooled outputs belong are unknown.

        Raises:
            ValueError: keys have different batch sizes, and the batch has no inverse indices.
        """
        if self.sizes is not None and self.features.inverse_indices_or_none() is None:
            sizes = dict(zip(self.features.keys(), self.sizes, strict=True))
            raise ValueError(
                f"the keys of the batch have batch sizes {sizes}: pooled outputs need inverse_indices, which say for "
                "each sample the bag of each key"
            )

    def expand(self, values: torch.Tensor, dims: Sequence[int], keys: Sequence[int]) -> torch.Tensor:
        """Expands pooled outputs of bags to pooled outputs of samples, with the batch's `inverse_indices`.

        Args:
            values: float32 `[B, sum(dims)]`, pooled outputs of bags.
            dims, keys: each output's number of columns, and the index of its key.

        Returns:
            float32 `[samples, sum(dims)]`; `values` itself if the batch has no `inverse_indices`.

        Raises:
            ValueError: `inverse_indices` have no row for a key.
            IndexError: an index is out of the range of its key's bags (checked on the CPU only).
        """
        places = self.bags_of_samples([self.features.keys()[key] for key in keys], values.device)
        if places is None:
            return values
        sizes = self.sizes
        parts = [
            (part if sizes is None else part[: sizes[key]]).index_select(0, bags)
            for part, key, bags in zip(values.split(list(dims), 1), keys, places, strict=True)
        ]
        return torch.cat(parts, 1)

    def bags_of_samples(self, keys: Sequence[str], device: torch.device) -> list[torch.Tensor] | None:
        """Returns the bag of each sample, int64 `[samples]` for each of `keys`; None without `inverse_indices`.

        Raises:
            ValueError: `inverse_indices` have no row for a key.
        """
        inverse = self.features.inverse_indices_or_none()
        if inverse is None:
            return None
        names, indices = inverse
        rows = {name: row for row, name in enumerate(names)}
        if set(keys) - rows.keys() or indices.dim() != 2 or len(names) != len(indices):
            raise ValueError(
                f"inverse_indices have keys {list(names)} and shape {tuple(indices.shape)}, expected [keys, samples] "
                f"with keys {list(keys)}"
            )
        indices = indices.to(device)
        return [indices[rows[key]] for key in keys]
