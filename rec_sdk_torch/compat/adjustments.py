"""Changes that importing compat makes to torch, TorchRec and this package:

- TorchRec's `Topology` treats `compute_device="npu"` as a device with its own memory, as in Rec SDK's patched wheel.
- `torch.ops.load_library` of `libfbgemm_npu_api.so`, Rec SDK's operators, does nothing if the file does not exist,
  because `rec_sdk_torch` has loaded its own operators.
- Adagrad and AccumulateAdagrad have Rec SDK's eps, 1e-8, unless the script sets it.
- Collections use Rec SDK's defaults for configs (`modules/defaults.py`): TorchRec's own configs make hash tables, and
  initial weights are Rec SDK's if a config does not set them.
- Processes that `multiprocessing` spawns (`torch.multiprocessing.spawn`) import compat before the script.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing.spawn
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from ..modules.defaults import use_rec_sdk_defaults
from ..patches.topology import DEVICE, plan_npu_as
from ..tbe import use_defaults

_OPERATORS = "libfbgemm_npu_api.so"
_ADAGRAD_EPS = 1e-8


@functools.cache
def install() -> None:
    """Applies the changes, once per process."""
    try:
        importlib.import_module("torchrec")
    except ModuleNotFoundError as error:
        raise ImportError(f"rec_sdk_torch.compat needs torchrec, which is not installed: {error}") from error
    plan_npu_as(DEVICE)
    torch.ops.load_library = _ignore_missing_operators(torch.ops.load_library)  # type: ignore[method-assign]
    multiprocessing.spawn.get_command_line = _with_compat(multiprocessing.spawn.get_command_line)
    use_defaults("Adagrad", eps=_ADAGRAD_EPS)
    use_rec_sdk_defaults()


def _ignore_missing_operators(load: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(load)
    def load_if_present(path: Any) -> None:
        if os.path.basename(path) != _OPERATORS:
            load(path)
            return
        try:
            load(path)
        except OSError:
            if os.path.exists(path):  # the script must see that an existing file cannot be loaded
                raise

    return load_if_present


def _with_compat(command_line: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """Returns `command_line` changed so that the spawned process imports compat, with this process's `sys.path`."""

    @functools.wraps(command_line)
    def with_compat(**kwargs: Any) -> list[str]:
        command = command_line(**kwargs)
        if "-c" in command:  # a frozen executable has no "-c"
            program = command.index("-c") + 1
            path = [os.path.abspath(folder) for folder in sys.path]
            command[program] = f"import sys; sys.path[:] = {path!r}; import rec_sdk_torch.compat; {command[program]}"
        return command

    return with_compat
