"""The interface of a save that is written while rows change."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from .batch import Int64Array


class Watcher(Protocol):
    """A save of one moment of a table: it takes rows as they are before they change."""

    def before_update(self, slots: np.ndarray) -> None: ...

    def before_change(self, ids: Int64Array) -> None: ...

    def before_all_change(self) -> None: ...

    def before_replacement(self) -> None: ...
