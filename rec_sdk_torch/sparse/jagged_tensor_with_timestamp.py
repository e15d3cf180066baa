"""Jagged tensors with a timestamp for each id, for tables that evict ids by age, and with click labels of samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils._pytree import GetAttrKey, register_pytree_node
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from ..runtime.numbers import cast_in_range

Features = TypeVar("Features", bound=KeyedJaggedTensor)


def _check_tensors(timestamps: torch.Tensor | None, values: torch.Tensor, **others: torch.Tensor | None) -> None:
    for name, tensor in {"timestamps": timestamps, "values": values, **others}.items():
        if not isinstance(tensor, (torch.Tensor, torch.fx.Proxy)) and (tensor is not None or name == "values"):
            raise TypeError(f"{name} is {tensor!r}, expected a tensor")
    if timestamps is None:
        return
    if timestamps.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"timestamps are {timestamps.dtype}, expected torch.int32 or torch.int64")
    if timestamps.shape != values.shape:
        raise ValueError(
            f"timestamps have shape {tuple(timestamps.shape)}, expected the shape of ids, {tuple(values.shape)}"
        )


class JaggedTensorWithTimestamp(JaggedTensor):
    """A JaggedTensor of ids, each with a timestamp in seconds.

    Args:
        values: ids, int32 or int64 `[n]`.
        weights: float `[n]`; None: no weights.
        lengths, offsets: integers `[B]` and `[B + 1]`; one of the two is enough.
        timestamps: the time of each id in seconds, int32 or int64 `[n]`; None: no timestamps.

    Example:
        >>> import torch
        >>> from rec_sdk_torch import JaggedTensorWithTimestamp
        >>> ids, seconds = torch.tensor([7, 8]), torch.tensor([1_700_000_000, 1_700_000_060])
        >>> JaggedTensorWithTimestamp(ids, lengths=torch.tensor([2]), timestamps=seconds).timestamps.shape
        torch.Size([2])
    """

    def __init__(
        self,
        values: torch.Tensor,
        weights: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        timestamps: torch.Tensor | None = None,
    ) -> None:
        """Creates a jagged tensor; see the class for the arguments.

        Raises:
            ValueError, TypeError: timestamps are not one integer per id, or an argument is not a tensor.
        """
        _check_tensors(timestamps, values, weights=weights, lengths=lengths, offsets=offsets)
        super().__init__(values, weights, lengths, offsets)
        self._timestamps = timestamps

    @property
    def timestamps(self) -> torch.Tensor | None:
        """The timestamp of each id in seconds, `[n]`; None: no timestamps."""
        return self._timestamps

    def to(self, device: torch.device, non_blocking: bool = False) -> JaggedTensorWithTimestamp:
        """Returns a copy on `device`, with timestamps."""
        plain = super().to(device, non_blocking)
        timestamps = self._timestamps
        if timestamps is not None:
            timestamps = timestamps.to(device, non_blocking=non_blocking)
        return JaggedTensorWithTimestamp(
            plain.values(), plain.weights_or_none(), plain.lengths_or_none(), plain.offsets_or_none(), timestamps
        )

    def record_stream(self, stream: Any) -> None:
        """Marks the memory as used on `stream`; see `torch.Tensor.record_stream`."""
        super().record_stream(stream)
        if self._timestamps is not None:
            self._timestamps.record_stream(stream)


class KeyedJaggedTensorWithTimestamp(KeyedJaggedTensor):
    """A KeyedJaggedTensor of ids, each with a timestamp in seconds; its samples may have click labels.

    Parts and copies (`to`, `pin_memory`, `split`, `permute`, `[key]`) keep the timestamps; all but `[key]` also keep
    the click labels.

    Example:
        >>> import torch
        >>> from rec_sdk_torch import KeyedJaggedTensorWithTimestamp
        >>> batch = KeyedJaggedTensorWithTimestamp(
        ...     ["item"],
        ...     torch.tensor([7, 8]),
        ...     timestamps=torch.tensor([1_700_000_000, 1_700_000_060]),
        ...     lengths=torch.tensor([1, 1]),
        ...     click_labels=torch.tensor([1, 0]),
        ... )
        >>> batch["item"].timestamps.tolist()
        [1700000000, 1700000060]
    """

    def __init__(
        self,
        keys: list[str],
        values: torch.Tensor,
        timestamps: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        *args: Any,
        click_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """Creates a keyed jagged tensor.

        Args:
            keys, values, weights, lengths, offsets, args, kwargs: see TorchRec's KeyedJaggedTensor.
            timestamps: the time of each id in seconds, int32 or int64 `[n]`; None: no timestamps.
            click_labels: how often each sample was clicked, whole numbers `[B]`; a negative number means no click.

        Raises:
            ValueError, TypeError: timestamps are not one integer per id, labels are not one whole number per sample, or
                an argument is not a tensor.
        """
        _check_tensors(timestamps, values, weights=weights, lengths=lengths, offsets=offsets)
        super().__init__(keys, values, weights, lengths, offsets, *args, **kwargs)
        self._timestamps = timestamps
        self._click_labels: torch.Tensor | None = None
        if click_labels is not None:
            with_click_labels(self, click_labels)

    @property
    def timestamps(self) -> torch.Tensor | None:
        """The timestamp of each id in seconds, `[n]`; None: no timestamps."""
        return self._timestamps

    @staticmethod
    def from_jt_dict(jt_dict: Mapping[str, JaggedTensor]) -> KeyedJaggedTensorWithTimestamp:
        """Returns one keyed jagged tensor with the keys and jagged tensors of a dict.

        Raises:
            ValueError: some of the jagged tensors have timestamps and others have none.
        """
        stamps = [getattr(jagged, "timestamps", None) for jagged in jt_dict.values()]
        if any(stamp is None for stamp in stamps) and any(stamp is not None for stamp in stamps):
            lacking = [key for key, stamp in zip(jt_dict, stamps, strict=True) if stamp is None]
            raise ValueError(f"keys {lacking} have no timestamps, the others have")
        plain = KeyedJaggedTensor.from_jt_dict(dict(jt_dict))
        present = [stamp for stamp in stamps if stamp is not None]
        return _with_extras(plain, torch.cat(present) if present else None, None)

    def to(self, device: torch.device, non_blocking: bool = False, dtype: Any = None) -> KeyedJaggedTensorWithTimestamp:
        """Returns a copy on `device`, with timestamps and click labels."""
        extras = (_move(extra, device, non_blocking) for extra in (self._timestamps, self._click_labels))
        return _with_extras(super().to(device, non_blocking, dtype), *extras)

    def pin_memory(self) -> KeyedJaggedTensorWithTimestamp:
        """Returns a copy in page-locked memory, with timestamps and click labels."""
        extras = (None if extra is None else extra.pin_memory() for extra in (self._timestamps, self._click_labels))
        return _with_extras(super().pin_memory(), *extras)

    def record_stream(self, stream: Any) -> None:
        """Marks the memory as used on `stream`; see `torch.Tensor.record_stream`."""
        super().record_stream(stream)
        for extra in (self._timestamps, self._click_labels):
            if extra is not None and extra.device.type != "cpu":
                extra.record_stream(stream)

    def split(self, segments: list[int]) -> list[KeyedJaggedTensor]:
        """Splits the batch by keys: the parts have `segments` consecutive keys each."""
        borders = self.offset_per_key()
        parts: list[KeyedJaggedTensor] = []
        first = 0
        for part, segment in zip(super().split(segments), segments, strict=True):
            begin, end = borders[first], borders[first + segment]
            stamps = None if self._timestamps is None else self._timestamps[begin:end]
            parts.append(_with_extras(part, stamps, self._click_labels))
            first += segment
        return parts

    def permute(self, indices: list[int], indices_tensor: torch.Tensor | None = None) -> KeyedJaggedTensor:
        """Returns a batch with the keys at `indices`, in this order."""
        stamps, borders = self._timestamps, self.offset_per_key()
        if stamps is not None:
            parts = [stamps[borders[index] : borders[index + 1]] for index in indices]
            stamps = torch.cat(parts) if parts else stamps[:0]
        return _with_extras(super().permute(indices, indices_tensor), stamps, self._click_labels)

    def flatten_lengths(self) -> KeyedJaggedTensor:
        """Returns a copy whose lengths have one dimension."""
        return _with_extras(super().flatten_lengths(), self._timestamps, self._click_labels)

    def __getitem__(self, key: str) -> JaggedTensorWithTimestamp:
        return self._of_key(key, super().__getitem__(key))

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """Returns a dict with the jagged tensor of each key."""
        plain = super().to_dict(compute_offsets)
        return {key: self._of_key(key, jagged) for key, jagged in plain.items()}

    def _of_key(self, key: str, plain: JaggedTensor) -> JaggedTensorWithTimestamp:
        index, borders = self.keys().index(key), self.offset_per_key()
        stamps = None if self._timestamps is None else self._timestamps[borders[index] : borders[index + 1]]
        return JaggedTensorWithTimestamp(
            plain.values(), plain.weights_or_none(), plain.lengths_or_none(), plain.offsets_or_none(), stamps
        )


def _move(extra: torch.Tensor | None, device: torch.device, non_blocking: bool) -> torch.Tensor | None:
    return None if extra is None else extra.to(device, non_blocking=non_blocking)


def _with_extras(
    plain: KeyedJaggedTensor, timestamps: torch.Tensor | None, labels: torch.Tensor | None
) -> KeyedJaggedTensorWithTimestamp:
    """Returns a copy of `plain` with timestamps and click labels."""
    result = KeyedJaggedTensorWithTimestamp.__new__(KeyedJaggedTensorWithTimestamp)
    result.__dict__.update(plain.__dict__)
    result._jt_dict = None
    result._timestamps, result._click_labels = timestamps, labels
    return result


def with_click_labels(features: Features, click_labels: torch.Tensor) -> Features:
    """Attaches click labels to a batch: how often each of its samples was clicked.

    Copies of a plain KeyedJaggedTensor (`to`, `pin_memory`) lose the labels; copies of a
    `KeyedJaggedTensorWithTimestamp` keep them. `EmbCacheTrainPipelineSparseDist` calls this with `batch.click_labels`.

    Args:
        features: a batch of B samples, modified in place.
        click_labels: whole numbers up to 2**31 - 1, `[B]` or `[B, 1]`; a negative number means no click.

    Returns:
        `features` itself.

    Raises:
        TypeError, ValueError: labels are not one whole number per sample, or a label exceeds int32.

    Example:
        >>> import torch
        >>> from torchrec import KeyedJaggedTensor
        >>> from rec_sdk_torch import with_click_labels
        >>> batch = KeyedJaggedTensor(["item"], torch.tensor([7, 8]), lengths=torch.tensor([1, 1]))
        >>> with_click_labels(batch, torch.tensor([1, 0])) is batch
        True
    """
    if click_labels.is_complex() or (
        click_labels.is_floating_point() and not torch.equal(click_labels, click_labels.round())
    ):
        raise TypeError(f"click_labels are {click_labels.dtype} and not whole: expected integers")
    if click_labels.numel() != features.stride():
        raise ValueError(
            f"click_labels have shape {tuple(click_labels.shape)}, expected one for each of {features.stride()} samples"
        )
    labels = click_labels.flatten()
    if labels.dtype not in _NARROW:
        exact = labels.double() if labels.is_floating_point() else labels
        labels = torch.from_numpy(cast_in_range("click_labels", exact.cpu().numpy(), np.int32, None)).to(labels.device)
    features._click_labels = labels.to(torch.int32)
    return features


_NARROW = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32)
"""Dtypes whose values all fit into int32."""


def clicks_of(features: KeyedJaggedTensor) -> torch.Tensor | None:
    """Returns the click label of each id's sample, int32 `[n]`; None if the batch has no labels."""
    labels: torch.Tensor | None = getattr(features, "_click_labels", None)
    if labels is None:
        return None
    if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
        raise NotImplementedError("click labels belong to samples: all keys of the batch must have the same batch size")
    lengths = features.lengths()
    return labels.to(lengths.device).repeat(len(features.keys())).repeat_interleave(lengths)


def timestamps_of(features: KeyedJaggedTensor) -> torch.Tensor | None:
    """Returns the timestamp of each id, `[n]`; None if the batch has no timestamps."""
    stamps: torch.Tensor | None = getattr(features, "_timestamps", None)
    return stamps


_EXTRAS = ("_timestamps", "_click_labels")


def _flatten(features: KeyedJaggedTensorWithTimestamp) -> tuple[list[Any], Any]:
    names = ("_values", "_weights", "_lengths", "_offsets", *_EXTRAS)
    rest = features._keys, features._stride, features._stride_per_key_per_rank, features._inverse_indices
    return [getattr(features, name) for name in names], rest


def _flatten_with_keys(features: KeyedJaggedTensorWithTimestamp) -> tuple[list[tuple[Any, Any]], Any]:
    values, context = _flatten(features)
    names = ("_values", "_weights", "_lengths", "_offsets", *_EXTRAS)
    return [(GetAttrKey(name), value) for name, value in zip(names, values, strict=True)], context


def _unflatten(parts: Iterable[Any], context: Any) -> KeyedJaggedTensorWithTimestamp:
    keys, stride, per_rank, inverse = context
    values, weights, lengths, offsets, timestamps, labels = parts
    plain = KeyedJaggedTensor(
        keys, values, weights, lengths, offsets, stride, stride_per_key_per_rank=per_rank, inverse_indices=inverse
    )
    return _with_extras(plain, timestamps, labels)


register_pytree_node(
    KeyedJaggedTensorWithTimestamp,
    _flatten,
    _unflatten,
    flatten_with_keys_fn=_flatten_with_keys,
    serialized_type_name="rec_sdk_torch.KeyedJaggedTensorWithTimestamp",
)
