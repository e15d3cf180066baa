"""The update journal: resumes an update that an interrupt broke off, without repeating calls that have run."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

Call: TypeAlias = tuple[Any, ...]
"""(function, *arguments) of a C function: an interrupt can come before or after the call, but not inside it."""

Run = Callable[..., None]
"""(function, *arguments) -> None: calls the function, unless a journal records that it has run."""


def run_now(function: Callable[..., Any], *arguments: Any) -> None:
    """Calls `function` unconditionally; serves as the `Run` of updates without a journal."""
    function(*arguments)


class UpdateJournal:
    """A record of the calls of an update that have run, since no call that updates rows may run twice.

    After an interrupt the update is repeated from its start; `run` skips the recorded calls.
    """

    def __init__(self) -> None:
        self._ran: dict[Hashable, list[None]] = {}

    def empty(self) -> bool:
        """Returns whether no call has run."""
        return not any(self._ran.values())

    def has(self, key: Hashable) -> bool:
        """Returns whether the call with this key has run."""
        return bool(self._ran.get(key))

    def run(self, key: Hashable, function: Callable[..., Any], *arguments: Any) -> None:
        """Calls `function` and records it under `key`, unless it is recorded already.

        `function` must be a C function: Python checks for interrupts inside Python functions.
        """
        ran = self._ran.setdefault(key, [])
        if not ran:
            # `extend` over `map` is one C call that runs the function and records it: no interrupt can come in between.
            ran.extend(map(function, *((argument,) for argument in arguments)))
