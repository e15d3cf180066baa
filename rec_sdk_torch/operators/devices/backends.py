"""The devices a cache can live on. A backend is one `Backend` and one line in `_BACKENDS`."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...runtime.eager import refuse_captures
from . import cpu, cuda, npu


def _allocate(rows: int, width: int, device: torch.device) -> torch.Tensor:
    return torch.empty((rows, width), dtype=torch.uint8, device=device)


def _nothing(*_: torch.device) -> None:
    pass


@dataclass(frozen=True)
class Backend:
    """The facts about a device type that the host side of the package needs to know."""

    free_memory: Callable[[torch.device], int]
    """Bytes of device memory that can still be allocated."""
    pin_staging: bool
    """Whether staging buffers are page-locked for asynchronous copies."""
    reaches_host: bool = False
    """Whether kernels can read and write staging buffers, so that a swap may do without copies."""
    joins_lookups: bool = False
    """Whether it has kernels that swap rows and look them up in one launch."""
    allocate_cache: Callable[[int, int, torch.device], torch.Tensor] = _allocate
    """(rows, width, device) -> an uninitialised device cache, uint8 `[rows, width]`."""
    load: Callable[[], None] = _nothing
    """Makes torch know the device type and the operators' kernels for it; ImportError says what is missing."""
    start: Callable[[torch.device], None] = _nothing
    """Prepares one device; ValueError if there is none."""


_BACKENDS = {
    "cpu": Backend(cpu.free_memory, pin_staging=False, allocate_cache=cpu.allocate_cache),
    "cuda": Backend(cuda.free_memory, pin_staging=True, reaches_host=True, load=cuda.load_operators, start=cuda.start),
    "npu": Backend(npu.free_memory, pin_staging=True, joins_lookups=True, load=npu.load_operators, start=npu.start),
}


def backend_for(device: torch.device) -> Backend:
    """The backend of `device`, ready to run its operators.

    Raises:
        NotImplementedError: there is none for that device type.
        ImportError: there is, and the device's own software is missing.
        ValueError: there is no such device.
    """
    if device.type not in _BACKENDS:
        raise NotImplementedError(
            f"device {str(device)!r}: tables can live on {sorted(_BACKENDS)} only. On another device that torch knows "
            "the operators torch.ops.rec_sdk run, slowly; for tables, rec_sdk_torch/operators/devices/backends.py has "
            "to say how its memory is counted and copied"
        )
    backend = _BACKENDS[device.type]
    backend.load()
    backend.start(device)
    if device.type != "cpu":
        refuse_captures(device.type)
    return backend


def load_operators(device: torch.device) -> None:
    """Makes the kernels of the device's backend known to torch, if it has a backend.

    Raises:
        ImportError, ValueError: as `backend_for`.
    """
    if device.type in _BACKENDS:
        backend_for(device)


def _accelerator(index: int) -> torch.device:
    """The device that torch means by a bare index."""
    try:
        return torch.device(index)
    except (RuntimeError, ValueError) as error:  # the latter for more than int64 holds
        raise ValueError(
            f"device {index}: an int is an index of torch's accelerator; {error} The host is 'cpu'"
        ) from error


def parse_device(device: torch.device | str | int | None) -> torch.device:
    """`device` as torch knows it, the default device when None; "npu" or "cuda" without an index is the current one.

    An int is an index of the accelerator that torch has, as in `torch.device(0)`.

    Raises:
        ImportError, ValueError: as `backend_for`; torch alone knows no "npu".
        TypeError: neither a device, a string, an int nor None.
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
