"""Device types that can hold a cache; `_BACKENDS` has a `Backend` for each."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...runtime.eager import refuse_captures
from . import cpu, cuda, npu


def _allocate(rows: int, width: int, device: torch.device) -> torch.Tensor:
    return torch.empty((rows, width), dtype=torch.uint8, device=device)


def _do_nothing(*_: torch.device) -> None:
    pass


@dataclass(frozen=True)
class Backend:
    """Properties and functions of a device type, for the host side of the package."""

    free_memory: Callable[[torch.device], int]
    """(device) -> bytes of device memory that can still be allocated."""
    pin_staging: bool
    """Whether staging buffers are page-locked for asynchronous copies."""
    reaches_host: bool = False
    """Whether kernels can access staging buffers in host memory, so that a swap may need no copies."""
    joins_lookups: bool = False
    """Whether there are kernels that swap rows and look them up in one launch."""
    allocate_cache: Callable[[int, int, torch.device], torch.Tensor] = _allocate
    """(rows, width, device) -> an uninitialised cache, uint8 `[rows, width]`."""
    load: Callable[[], None] = _do_nothing
    """Registers the device type and the operators' kernels with torch; raises ImportError if software is missing."""
    start: Callable[[torch.device], None] = _do_nothing
    """Initializes one device; raises ValueError if it does not exist."""


_BACKENDS = {
    "cpu": Backend(cpu.free_memory, pin_staging=False, allocate_cache=cpu.allocate_cache),
    "cuda": Backend(cuda.free_memory, pin_staging=True, reaches_host=True, load=cuda.load_operators, start=cuda.start),
    "npu": Backend(npu.free_memory, pin_staging=True, joins_lookups=True, load=npu.load_operators, start=npu.start),
}


def backend_for(device: torch.device) -> Backend:
    """Loads and returns the backend of `device`, which is then ready to run operators.

    Raises:
        NotImplementedError: there is no backend for the device type.
        ImportError: the software of the device is missing.
        ValueError: the machine has no such device.
    """
    if device.type not in _BACKENDS:
        raise NotImplementedError(
            f"device {str(device)!r}: tables are supported on {sorted(_BACKENDS)} only. On other devices of torch, the "
            "operators torch.ops.rec_sdk run, slowly; for tables, add a backend with the device's memory functions to "
            "rec_sdk_torch/operators/devices/backends.py"
        )
    backend = _BACKENDS[device.type]
    backend.load()
    backend.start(device)
    if device.type != "cpu":
        refuse_captures(device.type)
    return backend


def load_operators(device: torch.device) -> None:
    """Loads the kernels of the device's backend; does nothing for a device without a backend.

    Raises:
        ImportError, ValueError: see `backend_for`.
    """
    if device.type in _BACKENDS:
        backend_for(device)


def _accelerator(index: int) -> torch.device:
    """Returns the device that torch creates from an index without a device type."""
    try:
        return torch.device(index)
    except (RuntimeError, ValueError) as error:  # ValueError if the index exceeds int64
        raise ValueError(
            f"device {index}: an int is an index of torch's accelerator; {error} The host is 'cpu'"
        ) from error


def parse_device(device: torch.device | str | int | None) -> torch.device:
    """Converts a user's argument to a `torch.device`, with an index for "npu" and "cuda".

    Args:
        device: one of: a device; a device's name, where "npu" and "cuda" without an index mean the current device; an
            index of the machine's accelerator, as in `torch.device(0)`; or None for torch's default device.

    Raises:
        ImportError: the software of the device is missing. torch accepts "npu" only after loading torch_npu.
        ValueError: the name is invalid, or the machine has no such device.
        TypeError: `device` has another type.
    """
    if isinstance(device, bool) or not isinstance(device, (torch.device, str, numbers.Integral, type(None))):
        raise TypeError(f"device is {device!r}, expected a torch.device, a string, an int or None")
    if isinstance(device, numbers.Integral):
        device = _accelerator(int(device))
    elif device is None:
        device = torch.get_default_device()
    kind = str(device).partition(":")[0]
    if kind in _BACKENDS:
        _BACKENDS[kind].load()
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device is {device!r}: {str(error).splitlines()[0]}") from None
    if parsed.type == "cpu" or parsed.type not in _BACKENDS:
        return parsed
    _BACKENDS[parsed.type].start(parsed)
    if parsed.index is not None:
        return parsed
    return torch.empty(0, device=parsed).device
