"""Gathers the rows of sharded tables into one state dict; extends TorchRec's `state_dict_gather`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..runtime.host_groups import exchanging, host_group
from ..runtime.warn import SaveWarning, warn

Rest = Callable[[Mapping[str, Any], Mapping[str, Any]], None]
"""Function that gathers the keys without ids."""


def state_dict_gather(src: Mapping[str, Any], dst: Mapping[str, Any]) -> None:
    """Fills `dst` on rank 0 with the rows in the `src` of all ranks (collective).

    Row i of a weight `[n, D]` in `dst` is the row of id i in the sharded table. Rows of `dst` whose
    id no rank has are filled with zeros, with a warning. Keys without ids are gathered by TorchRec.

    Args:
        src: state dict of this rank, of a sharded model or converted by TorchRec's `state_dict_to_device`.
        dst: state dict of an unsharded model of TorchRec's or torch's modules. On ranks other than 0 its tensors may be
            on the meta device.

    Raises:
        ValueError: an id has no row in the weight of `dst`, the weight has another shape, or `dst` has tables of this
            package. All ranks raise the error, and nothing was written.

    Example:
        >>> import torch
        >>> from rec_sdk_torch import state_dict_gather
        >>> of_this_rank = {"t.ids": torch.tensor([2, 0]), "t.weight": torch.tensor([[2.0], [1.0]])}
        >>> whole = {"t.weight": torch.empty(3, 1)}
        >>> state_dict_gather(of_this_rank, whole)  # warns of the id 1
        >>> whole["t.weight"].tolist()
        [[1.0], [0.0], [2.0]]
    """
    from torchrec.inference import state_dict_transform

    state_dict_transform.state_dict_gather(src, dst)  # TorchRec's function is patched to call `gather`


def gather(src: Mapping[str, Any], dst: Mapping[str, Any], rest: Rest) -> None:
    """Gathers the rows of keys with ids as `state_dict_gather` describes; calls `rest` for all other keys."""
    own = {key for key in dst if f"{key.removesuffix('.weight')}.ids" in src and key.endswith(".weight")}
    own |= {key for key in dst if key.endswith(".ids") and f"{key.removesuffix('.ids')}.weight" in src}
    world = dist.group.WORLD if own and dist.is_initialized() else None
    group = None if world is None else host_group(world, "gathered state dicts")
    counts: dict[str, list[int]] = {}
    for key in sorted(own):
        ids = src[f"{key.removesuffix('.weight')}.ids"] if key.endswith(".weight") else torch.empty(0, device="cpu")
        counts_and_problems = [(len(ids), _find_problem(key, ids, src[key], dst[key]))]
        if group is not None:
            of_rank, counts_and_problems = counts_and_problems[0], [(0, "")] * dist.get_world_size(group)
            with exchanging(f"how many rows of {key} each rank has", group):
                dist.all_gather_object(counts_and_problems, of_rank, group=group)
        for rank, (_, problem) in enumerate(counts_and_problems):
            if problem:
                raise ValueError(f"{key}: {problem} (rank {rank})")
        counts[key] = [count for count, _ in counts_and_problems]
    for key, of_ranks in counts.items():
        with contextlib.nullcontext() if group is None else exchanging(f"the rows of {key}", group):
            _gather_rows(key, src[f"{key.removesuffix('.weight')}.ids"], src[key], dst[key], of_ranks, group)
    rest(src, {key: value for key, value in dst.items() if key not in own})


def _find_problem(key: str, ids: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> str:
    """Returns the reason why rows of this rank do not fit into `target`, "" if all of them fit."""
    if key.endswith(".ids"):
        return "the target has tables of this package, whose rows a Saver brings over: Saver().save, then load there"
    if target.dim() != 2 or target.shape[1] != weight.shape[1]:
        return f"the target is {tuple(target.shape)}, rows have {weight.shape[1]} elements"
    wrong = ids[(ids < 0) | (ids >= len(target))]
    if not len(wrong):
        return ""
    return (
        f"{len(wrong)} ids (such as {int(wrong[0])}) are no rows of the target, which has {len(target)}: load a save "
        "into an unsharded model, of which rec_sdk_torch.export.to_torchrec makes one of TorchRec's with a map of ids"
    )


def _gather_rows(
    key: str, ids: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, counts: list[int], group: Any
) -> None:
    """Writes the rows of all ranks into `target` on rank 0."""
    parts = rows_of_ranks(ids, weight, counts, group)
    if group is not None and dist.get_rank(group) > 0:
        next(parts, None)
        return
    known = torch.zeros(len(target), dtype=torch.bool, device="cpu")
    with torch.no_grad():
        for of_rank, rows in parts:
            target[of_rank.to(target.device)] = rows.to(target.device, target.dtype)
            known[of_rank] = True
        target[~known.to(target.device)] = 0
    if not bool(known.all()):
        warn(
            f"{key}: {int((~known).sum())} of {len(known)} rows are zeros: no rank has rows for these ids", SaveWarning
        )


def rows_of_ranks(
    ids: torch.Tensor, weight: torch.Tensor, counts: Sequence[int], group: dist.ProcessGroup | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the ids and weights of each rank on rank 0; other ranks send their rows and yield nothing (collective).

    Args:
        ids: ids of this rank's rows.
        weight: weights of this rank's rows, `[n, D]`.
        counts: number of rows of each rank.
        group: process group for tensors in host memory; None for a single process.
    """
    if group is not None and dist.get_rank(group) > 0:
        if len(ids):
            for part in (ids, weight):
                dist.send(as_bytes(part), group=group, group_dst=0)
        return
    yield ids.cpu(), weight
    for rank, count in enumerate(counts[1:], 1):
        if count:
            of_rank = torch.empty(count, dtype=torch.int64, device="cpu")
            rows = torch.empty((count, weight.shape[1]), dtype=weight.dtype, device="cpu")
            for part in (of_rank, rows):
                dist.recv(as_bytes(part), group=group, group_src=rank)
            yield of_rank, rows


def as_bytes(part: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's bytes in host memory, as uint8; gloo does not support every data type."""
    return part.detach().cpu().contiguous().view(torch.uint8)
