"""Defaults for fields that a table's config does not set; `rec_sdk_torch.compat` switches to Rec SDK's defaults."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from ..runtime.warn import ConfigurationWarning, warn
from ..tbe import InitializerType


@dataclass
class ConfigDefaults:
    """Defaults for configs of tables.

    Attributes:
        torchrec_configs_hashed: whether TorchRec's own configs create hash tables instead of index tables.
        cached_range: range of initial weights of a cached hash table whose config has no min or max; None for the
            default of `TableConfig`.
        cached_initializer: initializer of a cached hash table whose config has no `initializer_type`.
        warns_changed_default: whether the next config without `initializer_type` logs a warning that the default has
            changed.
    """

    torchrec_configs_hashed: bool = False
    cached_range: tuple[float, float] | None = None
    cached_initializer: InitializerType = InitializerType.UNIFORM
    warns_changed_default: bool = True


config_defaults = ConfigDefaults()
"""The defaults of this process."""


_AS_INDEX: ContextVar[bool] = ContextVar("_AS_INDEX", default=False)


def hashes_torchrec_configs() -> bool:
    """Returns whether TorchRec's own configs create hash tables in this context."""
    return config_defaults.torchrec_configs_hashed and not _AS_INDEX.get()


@contextlib.contextmanager
def torchrec_configs_as_index() -> Iterator[None]:
    """Makes TorchRec's own configs create index tables inside the context; used to convert TorchRec's collections."""
    token = _AS_INDEX.set(True)
    try:
        yield
    finally:
        _AS_INDEX.reset(token)


def use_rec_sdk_defaults() -> None:
    """Switches this process to Rec SDK's defaults."""
    config_defaults.torchrec_configs_hashed = True
    config_defaults.cached_range = (0.0, 1.0)
    config_defaults.cached_initializer = InitializerType.LINEAR
    config_defaults.warns_changed_default = False


def warn_changed_default(table: str) -> None:
    """Warns once per process that the default of `initializer_type` has changed."""
    if not config_defaults.warns_changed_default:
        return
    config_defaults.warns_changed_default = False
    warn(
        f"table {table!r}: its config gives no initializer_type, so new rows are UNIFORM, as TorchRec's are; up to "
        "version 0.2.0 they were LINEAR, the same row for every id. That also holds for new ids of a table that was "
        "loaded, since a save does not hold the initializer. Give configs initializer_type=InitializerType.UNIFORM, "
        "or LINEAR for the rows of before: either silences this warning, which the next version does not have",
        ConfigurationWarning,
    )
