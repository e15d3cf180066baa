"""Pending gradients of an embedding, which `step()` of the optimizer will apply (`update="step"`)."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from ..cache.pending_gradients import GroupGradients


class PinningBatch(Protocol):
    """A batch whose plans pin rows in the cache."""

    def release(self) -> None: ...


class PendingGradients(NamedTuple):
    """The gradients of all backward passes since the last `step()`.

    The object is immutable. One assignment replaces it, so that an interrupt cannot add half of a backward pass.

    Attributes:
        rows: for each group, the rows with their gradients; None for a group without gradients.
        pinning_batches: batches whose plans keep these rows in the cache.
        backward_passes: number of backward passes.
        skipped_tables: tables whose gradient the user has set to None since the last backward pass.
        changes: by table name, a checksum of the user's changes to gradients of replicated tables since `step()`.
        applied: by table name, a checksum of these changes in all earlier updates.
    """

    rows: Sequence[GroupGradients | None] = ()
    pinning_batches: tuple[PinningBatch, ...] = ()
    backward_passes: int = 0
    skipped_tables: frozenset[str] = frozenset()
    changes: Mapping[str, int] = {}
    applied: Mapping[str, int] = {}

    def cleared(self, applied: bool) -> PendingGradients:
        """Returns an object without gradients; `applied`: True after an update, False if they were discarded."""
        return PendingGradients(applied=combine_checksums(self.applied, self.changes) if applied else self.applied)

    def applied_checksums(self) -> dict[str, dict[str, str]]:
        """Returns the checksums of `applied` by table, in the form that the rank consistency check compares."""
        return {name: {"changes of its grad": f"checksum {number:08x}"} for name, number in self.applied.items()}


NO_PENDING_GRADIENTS = PendingGradients()


def combine_checksums(before: Mapping[str, int], changes: Mapping[str, int]) -> Mapping[str, int]:
    """Extends the checksums of earlier changes by the ones in `changes`, by table name; 0 means no change."""
    extended = {name: zlib.crc32(number.to_bytes(4), before.get(name, 0)) for name, number in changes.items() if number}
    return {**before, **extended}
