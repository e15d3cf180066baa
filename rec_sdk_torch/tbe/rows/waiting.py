"""The gradients of an embedding's tables that wait for `step()` of their optimizer (`update="step"`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..cache.waiting import WaitingRows


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
    """

    rows: Sequence[WaitingRows | None] = ()
    holders: tuple[Holder, ...] = ()
    backwards: int = 0
    left_out: frozenset[str] = frozenset()

    def explain(self, error: Exception) -> None:
        """Says in an error of a cache that is too small what is in it."""
        if self.backwards:
            error.add_note(
                f"{self.backwards} backward passes wait for step() of the optimizer, and hold their rows in the cache"
            )


NOTHING = Waiting()
