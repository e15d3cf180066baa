"""How a collection reads a config where the config does not say it; `rec_sdk_torch.compat` sets Rec SDK's ways."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from ..runtime.warn import ConfigurationWarning, warn
from ..tbe import InitializerType


@dataclass
class ConfigDefaults:
    """
    Attributes:
        torchrec_configs_hashed: TorchRec's own configs make hash tables, not index tables.
        cached_range: initial weights of cached hash tables whose configs give no min or max; None: as
            `TableConfig` has them.
        cached_initializer: of cached hash tables whose configs give no `initializer_type`.
        warns_changed_default: whether the next config without `initializer_type` warns that the default has changed.
    """

    torchrec_configs_hashed: bool = False
    cached_range: tuple[float, float] | None = None
    cached_initializer: InitializerType = InitializerType.UNIFORM
    warns_changed_default: bool = True


config_defaults = ConfigDefaults()
"""The defaults of this process."""


_AS_INDEX: ContextVar[bool] = ContextVar("_AS_INDEX", default=False)


def hashes_torchrec_configs() -> bool:
    """Whether TorchRec's own configs make hash tables here and now."""
    return config_defaults.torchrec_configs_hashed and not _AS_INDEX.get()


@contextlib.contextmanager
def torchrec_configs_as_index() -> Iterator[None]:
    """Within it TorchRec's own configs make index tables: those of TorchRec's own collections."""
    token = _AS_INDEX.set(True)
    try:
        yield
    finally:
        _AS_INDEX.reset(token)


def use_rec_sdk_defaults() -> None:
    """From now on those of Rec SDK hold."""
    config_defaults.torchrec_configs_hashed = True
    config_defaults.cached_range = (0.0, 1.0)
    config_defaults.cached_initializer = InitializerType.LINEAR
    config_defaults.warns_changed_default = False


def warn_changed_default(table: str) -> None:
    """Warns once in a process that the default of `initializer_type` has changed."""
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
