"""The NPU backend: loads torch_npu and the libraries of its kernels when a device "npu" is first used."""

from __future__ import annotations

import ctypes
import functools
import importlib
import sys
from pathlib import Path

import torch

from ...runtime import emulator
from ..schemas import load_kernels

__all__ = ["free_memory", "load_operators", "start"]

_PACKAGE = Path(__file__).parents[2]
_KERNELS = "librec_sdk_ascendc.so"


def _install_advice(with_cann: str) -> str:
    """Returns the remedy for an error message: `pip install` with the arguments `with_cann`, or the emulated NPU.

    The emulated NPU is the remedy without CANN, since torch cannot be imported if torch_npu is installed without CANN.
    """
    if emulator.cann() and not emulator.active():
        return f"In the repository of rec_sdk_torch: {sys.executable} -m pip install {with_cann}"
    return f"On a machine with NPUs it needs CANN and torch_npu (docs/npu.md). {emulator.hint()}"


def _import_torch_npu() -> None:
    try:
        importlib.import_module("torch_npu")
    except ModuleNotFoundError as error:
        if error.name != "torch_npu":
            raise
        package = f"--no-deps torch-npu=={torch.__version__.partition('+')[0]} pyyaml"
        raise ImportError(
            f"device 'npu' needs the package torch_npu, which is not installed. {_install_advice(package)}"
        ) from error
    except (ImportError, OSError) as error:
        raise ImportError(
            f"device 'npu': torch_npu does not load, probably because CANN is missing ({error}). {emulator.hint()}"
        ) from error


def _kernels() -> Path:
    """Returns the path of the kernels' library: the build for the emulated NPU if it is active, else CANN's."""
    folder = emulator.library_directory() if emulator.active() else _PACKAGE
    return folder / _KERNELS


@functools.cache
def load_operators() -> None:
    """Registers device "npu" with torch, and makes `torch.ops.rec_sdk.*` run on it.

    Raises:
        ImportError: torch_npu, CANN, or this package's libraries for NPUs are missing; the message describes the
            remedy.
    """
    _import_torch_npu()
    kernels, operators = _kernels(), _PACKAGE / "_ops_npu.so"
    for path in (kernels, operators):
        if not path.exists():
            raise ImportError(
                f"device 'npu': {path} is missing, this build of rec_sdk_torch is without NPU kernels. "
                f"{_install_advice('--no-build-isolation --no-deps .')}"
            )
    ctypes.CDLL(str(kernels), mode=ctypes.RTLD_GLOBAL)
    load_kernels(operators)


def start(device: torch.device) -> None:
    """Initializes `device` in torch_npu with a first allocation.

    Without the allocation, torch_npu aborts the process in a later backward pass on any device, if another device was
    selected before `device` had memory and streams.

    Raises:
        ValueError: there is no such device.
    """
    count: int = torch.npu.device_count()  # type: ignore[attr-defined]
    if device.index is not None and device.index >= count:
        raise ValueError(f"device {str(device)!r}: there are {count} NPUs, 0 to {count - 1}")
    torch.empty(1, device=device)


def free_memory(device: torch.device) -> int:
    """Returns the bytes of device memory that can still be allocated."""
    with torch.npu.device(device):  # type: ignore[attr-defined]  # a new thread has no current device
        free: int = torch.npu.mem_get_info(device)[0]  # type: ignore[attr-defined]
    return free
