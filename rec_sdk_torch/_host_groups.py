"""Process groups of the same ranks as a model's, which exchange tensors in host memory, each for one use."""

from __future__ import annotations

import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def host_group(group: dist.ProcessGroup, use: str, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """The gloo group of the ranks of `group` for a `use`. All ranks must call it together.

    Args:
        group: of the model.
        use: for which there is one such group.
        timeout: of the new group; None: torch's default.
    """
    made = _groups.setdefault(group, {})
    if use not in made:
        ranks = dist.get_process_group_ranks(group)
        # Where only some ranks call it, torch names a group by the number of groups that each of them has.
        made[use] = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=not spans_world(group))
    return made[use]


def spans_world(group: dist.ProcessGroup) -> bool:
    """Whether all ranks are in `group`."""
    return dist.get_world_size(group) == dist.get_world_size()


def reaches_host(group: dist.ProcessGroup) -> bool:
    """Whether `group` exchanges tensors in host memory."""
    return torch.device("cpu") in group._device_types


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long a rank of `group` waits for another; None: it does not say."""
    backend = group._get_backend(group._device_types[0])
    timeout: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout
