"""Process groups of the same ranks as a model's, which exchange tensors in host memory, each for one use."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def host_group(group: dist.ProcessGroup, use: str) -> dist.ProcessGroup:
    """Returns the gloo group with the ranks and the timeout of `group` for a `use` (collective).

    Args:
        group: of the model.
        use: for which there is one such group.

    Raises:
        RuntimeError: a rank has ended, or does not come within the timeout.
    """
    made = _groups.setdefault(group, {})
    if use not in made:
        ranks, timeout = dist.get_process_group_ranks(group), timeout_of(group)
        # Where only some ranks call it, torch names a group by the number of groups that each of them has.
        with exchanging(f"addresses for {use}", group):
            made[use] = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=not spans_world(group))
    return made[use]


@contextlib.contextmanager
def exchanging(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Surrounds collectives of `group`; `what` names the exchange in the error.

    Raises:
        RuntimeError: the exchange fails, since another rank has ended or does not come.
    """
    try:
        yield
    except RuntimeError as error:
        raise lost_rank(what, dist.get_rank(group), dist.get_world_size(group), error) from error


def lost_rank(what: str, rank: int, world_size: int, error: RuntimeError) -> RuntimeError:
    """Returns the error of `rank` whose exchange of `what` has failed with torch's `error`."""
    return RuntimeError(
        f"rank {rank} of {world_size} could not exchange {what}: another rank has ended, has raised an error, or has "
        f"not come within the process group's timeout: {error}"
    )


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
