"""Patches torch.distributed.checkpoint, which treats a plain tensor as replicated on all ranks.

The state dict of a sharded table holds one rank's rows in plain tensors. Without the patch, a full state dict
(`StateDictOptions(full_state_dict=True)`) keeps the rows of rank 0 only, and a save chooses a rank for each key, so
that ids of one rank are saved with weights of another. With the patch, full state dicts hold whole tables. Saving or
loading one rank's rows raises an error unless the keys contain the rank. The patched functions are private ones, since
scripts may have imported the public functions before.
"""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any

from ..runtime.imports import after_import

_PACKAGE = "torch.distributed.checkpoint"


def install() -> None:
    """Patches each of torch's modules, now or as soon as it is imported."""
    after_import(f"{_PACKAGE}.state_dict", _wrap_full_state_dicts)
    after_import(f"{_PACKAGE}.state_dict_saver", _wrap_saves)
    after_import(f"{_PACKAGE}.state_dict_loader", _wrap_loads)


def _wrap_full_state_dicts(module: Any) -> None:
    get, load = module._get_model_state_dict, module._load_model_state_dict

    @functools.wraps(get)
    def getting(model: Any, info: Any) -> Any:
        with _with_full_tables(info, on_all_ranks=not info.cpu_offload):
            return get(model, info)

    @functools.wraps(load)
    def loading(model: Any, state_dict: Any, info: Any) -> Any:
        with _with_full_tables(info, on_all_ranks=True):
            return load(model, state_dict, info)

    module._get_model_state_dict, module._load_model_state_dict = getting, loading


def _with_full_tables(info: Any, on_all_ranks: bool) -> AbstractContextManager[None]:
    if not info.full_state_dict:
        return contextlib.nullcontext()
    from ..distributed.full_state_dicts import full_state_dicts

    return full_state_dicts(on_all_ranks)


def _wrap_saves(module: Any) -> None:
    convert = module._stateful_to_state_dict  # the first call of `save`, and of `async_save` in the calling thread

    @functools.wraps(convert)
    def converting(state_dict: Any) -> Any:
        result = convert(state_dict)
        _check_rank_rows(result)
        return result

    module._stateful_to_state_dict = converting
    module._save_state_dict = _with_check(module._save_state_dict)


def _wrap_loads(module: Any) -> None:
    module._load_state_dict = _with_check(module._load_state_dict)


def _with_check(function: Any) -> Any:
    @functools.wraps(function)
    def checked(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("no_dist"):
            _check_rank_rows(state_dict)
        return function(state_dict, *args, **kwargs)

    return checked


def _check_rank_rows(state_dict: Any) -> None:
    from ..runtime.rank_rows import refuse_rank_rows

    refuse_rank_rows(state_dict)
