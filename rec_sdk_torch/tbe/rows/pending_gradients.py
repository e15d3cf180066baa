"""The gradients of an embedding's tables that wait for `step()` of their optimizer (`update="step"`)."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from ..cache.pending_gradients import WaitingRows


class Holder(Protocol):
    """A batch that keeps rows in the cache."""

    def release(self) -> None: ...


class Waiting(NamedTuple):
    """The gradients that wait now. It is replaced as a whole: an interrupt finds a backward pass in it or not.

    Attributes:
        rows: of each group; None for no row.
        holders: batches that keep these rows in the cache.
        backwards: backward passes that wait.
        left_out: tables whose gradient was set to None since the last of them.
        changes: by name, a checksum of what was changed in gradients of replicated tables since the last `step()`.
        applied: the same of the updates before.
    """

    rows: Sequence[WaitingRows | None] = ()
    holders: tuple[Holder, ...] = ()
    backwards: int = 0
    left_out: frozenset[str] = frozenset()
    changes: Mapping[str, int] = {}
    applied: Mapping[str, int] = {}

    def after(self, applied: bool) -> Waiting:
        """Returns what is left of it after an update, or where the gradients were dropped."""
        return Waiting(applied=joined(self.applied, self.changes) if applied else self.applied)

    def told(self) -> dict[str, dict[str, str]]:
        """Returns the applied changes by table, as ranks tell each other."""
        return {name: {"changes of its grad": f"checksum {number:08x}"} for name, number in self.applied.items()}


NOTHING = Waiting()


def joined(before: Mapping[str, int], changes: Mapping[str, int]) -> Mapping[str, int]:
    """The checksums by name of what came `before`, and of `changes` after it, where 0 is none."""
    now = {name: zlib.crc32(number.to_bytes(4), before.get(name, 0)) for name, number in changes.items() if number}
    return {**before, **now}
