"""The CUDA backend: loads the library of its kernels when a device "cuda" is first used."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from ..schemas import load_kernels

__all__ = ["free_memory", "load_operators", "start"]

_OPERATORS = Path(__file__).parents[2] / "_ops_cuda.so"
_INSTALL = (
    "Install rec_sdk_torch again from its repository, where nvcc and a torch for the same CUDA are: "
    "pip install --no-build-isolation ."
)


@functools.cache
def load_operators() -> None:
    """Makes `torch.ops.rec_sdk.*` run on device "cuda".

    Raises:
        ImportError: torch is not a CUDA build, or this package's library for CUDA is missing or cannot be loaded; the
            message describes the remedy.
    """
    if torch.version.cuda is None:
        raise ImportError(
            f"device 'cuda' needs a CUDA build of torch; torch {torch.__version__} is one without. Install that first, "
            f"then rebuild. {_INSTALL}"
        )
    if not _OPERATORS.exists():
        raise ImportError(
            f"device 'cuda': {_OPERATORS} is missing, this build of rec_sdk_torch is without CUDA kernels. {_INSTALL}"
        )
    try:
        load_kernels(_OPERATORS)
    except OSError as error:
        raise ImportError(
            f"device 'cuda': {_OPERATORS} does not load with torch {torch.__version__} ({error}). {_INSTALL}"
        ) from error


def start(device: torch.device) -> None:
    """Initializes CUDA in torch.

    Raises:
        ValueError: there is no such device.
    """
    count = torch.cuda.device_count()
    if count == 0:
        raise ValueError(f"device {str(device)!r}: torch finds no GPU; does nvidia-smi list one?")
    if device.index is not None and device.index >= count:
        raise ValueError(f"device {str(device)!r}: there are {count} GPUs, 0 to {count - 1}")
    torch.cuda.init()


def free_memory(device: torch.device) -> int:
    """Returns the bytes of device memory that can still be allocated."""
    free: int = torch.cuda.mem_get_info(device)[0]
    return free
