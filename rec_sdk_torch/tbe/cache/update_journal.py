"""Steps that an interrupt can break off and that go on where they stopped."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

Call: TypeAlias = tuple[Any, ...]
"""(function, *arguments), of a function of C: an interrupt finds it made or not made."""

Run = Callable[..., None]
"""(function, *arguments) -> nothing: calls it, or did before."""


def run_now(function: Callable[..., Any], *arguments: Any) -> None:
    """Calls `function`, whatever was called before."""
    function(*arguments)


class UpdateJournal:
    """Which calls of a step have run: updates of rows, which must not run twice.

    A step is begun again from its start after an interrupt; the calls that have run are passed over.
    """

    def __init__(self) -> None:
        self._ran: dict[Hashable, list[None]] = {}

    def empty(self) -> bool:
        """Whether nothing has run."""
        return not any(self._ran.values())

    def has(self, key: Hashable) -> bool:
        """Whether the call of this name has run."""
        return bool(self._ran.get(key))

    def run(self, key: Hashable, function: Callable[..., Any], *arguments: Any) -> None:
        """Calls `function` unless that was done. It must be one of C: Python lets interrupts in between others."""
        ran = self._ran.setdefault(key, [])
        if not ran:
            # One call of C runs it and notes that it has run: no interrupt comes between.
            ran.extend(map(function, *((argument,) for argument in arguments)))
