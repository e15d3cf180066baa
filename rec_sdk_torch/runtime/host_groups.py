"""Gloo process groups for exchanges of host tensors: one group for each use, with the ranks of the model's group."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def host_group(group: dist.ProcessGroup, use: str) -> dist.ProcessGroup:
    """Returns the gloo group for `use` with the ranks and the timeout of `group`; creates it at the first call.

    The first call is collective: every rank of `group` must make it.

    Args:
        group: the model's process group.
        use: the name of a kind of exchange, such as "ids". Each name has a group of its own.

    Raises:
        RuntimeError: a rank has ended, or does not make the call within the timeout.
    """
    made = _groups.setdefault(group, {})
    if use not in made:
        ranks, timeout = dist.get_process_group_ranks(group), timeout_of(group)
        # Local synchronization is used only if some ranks do not make this call.
        # Local synchronization makes torch name the group by a rank's number of groups, which may differ between ranks.
        with exchanging(f"addresses for {use}", group):
            made[use] = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=not spans_world(group))
    return made[use]


@contextlib.contextmanager
def exchanging(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Returns a context around collectives of `group`, whose errors then name the ranks and the exchange `what`.

    Raises:
        RuntimeError: the exchange fails, because another rank has ended or does not take part.
    """
    try:
        yield
    except RuntimeError as error:
        raise lost_rank(what, dist.get_rank(group), dist.get_world_size(group), error) from error


def lost_rank(what: str, rank: int, world_size: int, error: RuntimeError) -> RuntimeError:
    """Returns the error to raise on `rank` when its exchange of `what` fails with torch's `error`."""
    return RuntimeError(
        f"rank {rank} of {world_size} could not exchange {what}: another rank has ended, has raised an error, or has "
        f"not taken part within the process group's timeout: {error}"
    )


def spans_world(group: dist.ProcessGroup) -> bool:
    """Returns whether `group` has all ranks."""
    return dist.get_world_size(group) == dist.get_world_size()


def reaches_host(group: dist.ProcessGroup) -> bool:
    """Returns whether `group` can exchange tensors in host memory."""
    return torch.device("cpu") in group._device_types


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Returns how long a rank of `group` waits for another rank; None if the backend does not expose it."""
    backend = group._get_backend(group._device_types[0])
    timeout: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout
