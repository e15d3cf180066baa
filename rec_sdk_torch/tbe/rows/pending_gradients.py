"""The gradients of an embedding's tables that wait for `step()` of their optimizer (`update="step"`)."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from ..cache.pending_gradients import GroupGradients


class PinningBatch(Protocol):
    """A batch that keeps rows in the cache."""

    def release(self) -> None: ...


class PendingGradients(NamedTuple):
    """The gradients that wait now. It is replaced as a whole: an interrupt finds a backward pass in it or not.

    Attributes:
        rows: of each group; None for no row.
        pinning_batches: batches that keep these rows in the cache.
        backward_passes: backward passes that wait.
        skipped_tables: tables whose gradient was set to None since the last of them.
        changes: by name, a checksum of what was changed in gradients of replicated tables since the last `step()`.
        applied: the same of the updates before.
    """

    rows: Sequence[GroupGradients | None] = ()
    pinning_batches: tuple[PinningBatch, ...] = ()
    backward_passes: int = 0
    skipped_tables: frozenset[str] = frozenset()
    changes: Mapping[str, int] = {}
    applied: Mapping[str, int] = {}

    def cleared(self, applied: bool) -> PendingGradients:
        """Returns what is left of it after an update, or where the gradients were dropped."""
        return PendingGradients(applied=combine_checksums(self.applied, self.changes) if applied else self.applied)

    def applied_checksums(self) -> dict[str, dict[str, str]]:
        """Returns the applied changes by table, as ranks tell each other."""
        return {name: {"changes of its grad": f"checksum {number:08x}"} for name, number in self.applied.items()}


NO_PENDING_GRADIENTS = PendingGradients()


def combine_checksums(before: Mapping[str, int], changes: Mapping[str, int]) -> Mapping[str, int]:
    """The checksums by name of what came `before`, and of `changes` after it, where 0 is none."""
    now = {name: zlib.crc32(number.to_bytes(4), before.get(name, 0)) for name, number in changes.items() if number}
    return {**before, **now}
