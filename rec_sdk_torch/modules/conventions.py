"""How a collection reads a config where the config does not say it; `rec_sdk_torch.compat` sets Rec SDK's ways."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from ..tbe import InitializerType


@dataclass
class Conventions:
    """
    Attributes:
        plain_hashed: TorchRec's own configs make hash tables, not index tables.
        cached_range: initial weights of cached hash tables whose configs give no min or max; None: as
            `TableConfig` has them.
        hash_initializer: `initializer_type` of a `HashEmbeddingBagConfig` that gives none.
    """

    plain_hashed: bool = False
    cached_range: tuple[float, float] | None = None
    hash_initializer: InitializerType = InitializerType.LINEAR


conventions = Conventions()
"""The conventions of this process."""


_INDEX: ContextVar[bool] = ContextVar("_INDEX", default=False)


def hashes_plain() -> bool:
    """Whether TorchRec's own configs make hash tables here and now."""
    return conventions.plain_hashed and not _INDEX.get()


@contextlib.contextmanager
def plain_as_index() -> Iterator[None]:
    """Within it TorchRec's own configs make index tables: those of TorchRec's own collections."""
    token = _INDEX.set(True)
    try:
        yield
    finally:
        _INDEX.reset(token)


def use_rec_sdk() -> None:
    """From now on those of Rec SDK hold."""
    conventions.plain_hashed = True
    conventions.cached_range = (0.0, 1.0)
    conventions.hash_initializer = InitializerType.UNIFORM
