"""Marks state-dict tensors that hold one rank's rows, and rejects them where torch would save them for all ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

_ranks: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""For the storage of each marked tensor: the rank whose rows it holds, and the number of ranks."""


def mark_rank_rows(tensors: Iterable[torch.Tensor], rank: int, world_size: int) -> None:
    """Marks `tensors` of a state dict, and all their views, as holding the rows of `rank` only."""
    for tensor in tensors:
        _ranks[tensor.untyped_storage()] = rank, world_size


def refuse_rank_rows(state_dict: Mapping[str, Any]) -> None:
    """Checks that the key of each tensor with one rank's rows contains the rank.

    torch.distributed.checkpoint saves only one rank's tensor for a key that all ranks have.

    Raises:
        ValueError: a key does not contain the rank, as `rank0` does for rank 0.
    """
    wrong = []
    for path, tensor in _tensors(state_dict, ()):
        rank, world_size = _ranks.get(tensor.untyped_storage(), (None, 0))
        if rank is not None and not any(re.search(rf"rank{rank}(?!\d)", name) for name in path):
            wrong.append((".".join(path), rank, world_size))
    if wrong:
        key, rank, world_size = wrong[0]
        raise ValueError(
            f"key {key!r} and {len(wrong) - 1} others have the rows of rank {rank} of {world_size}, and "
            "torch.distributed.checkpoint would use one rank's tensor for all ranks: save and load tables with "
            f"rec_sdk_torch.Saver, or let their keys name the rank, as 'rank{rank}.{key}' does (docs/torch.md)"
        )


def _tensors(value: Any, path: Sequence[str]) -> Iterator[tuple[Sequence[str], torch.Tensor]]:
    """Yields the path of keys and the tensor, for each plain tensor in nested dicts and lists."""
    if type(value) is torch.Tensor and value.layout == torch.strided:
        yield path, value
    elif isinstance(value, (Mapping, list, tuple)):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors(part, (*path, str(key)))
