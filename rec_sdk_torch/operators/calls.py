"""Calls of the operators.

Where torch knows no kernel for a device, the kernels of its backend are loaded. Where the backend has none, the
operator in plain torch stands in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from ..runtime.warn import PerformanceWarning, warn
from .default import KERNELS, Write
from .devices.backends import load_operators
from .schemas import OPERATORS, library, ops

__all__ = ["accumulate_rows", "call_once", "empty_output", "lookup_pooled", "lookup_sequence", "ops", "update_rows"]


def call_once(operator: Any, arguments: Sequence[object], called: list[Any]) -> None:
    """Calls an overload of an operator, unless `called`, empty at first, has what it gave when it was called.

    For an operator that must not run twice: Python's signal handlers, as the one of Ctrl-C, run before the call and its
    note, or after both, since C code alone lies between them.
    """
    if not called:
        called.extend(map(operator._op, *zip(arguments)))


_loaded: set[str] = set()
"""Types of devices whose kernels a call has loaded."""


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


@functools.cache
def _default_kernel(name: str, device_type: str) -> Callable[..., Any]:
    """The operator in plain torch; says once that a device has no other."""
    warn(
        f"rec_sdk::{name}: this build of rec_sdk_torch has no kernel of it for device {device_type!r}; torch's own "
        "operators stand in, which is slow",
        PerformanceWarning,
    )
    return KERNELS[name]


def _load_and_call(name: str, *args: Any, **kwargs: Any) -> Any:
    """Loads the kernels of a device of which torch knows none for an operator, and calls the operator again.

    Where the backend has none for it, or the device no backend, the operator in plain torch stands in
    (`default`). Without this function torch_npu would run the kernels of the CPU, on copies.

    Raises:
        ImportError, ValueError: as `devices.backends.load_operators`.
        NotImplementedError: for tensors of this kind there is nothing.
    """
    flat = [part for value in (*args, *kwargs.values()) for part in (value if isinstance(value, list) else [value])]
    tensors = [part for part in flat if isinstance(part, torch.Tensor)]
    tensor = next((each for each in tensors if each.device.type != "cpu"), tensors[0])
    if tensor.device.type not in _loaded:
        load_operators(tensor.device)
        _loaded.add(tensor.device.type)
        operator, _, overload = name.partition(".")
        return getattr(getattr(ops, operator), overload or "default")(*args, **kwargs)
    for each in tensors:
        if not _plain(each):
            raise NotImplementedError(f"rec_sdk::{name} takes strided tensors, got one that is {each.layout}")
    kernel = _default_kernel(name, tensor.device.type)
    # As below a kernel of C++: autograd sees nothing, and tensors of inference mode can be written.
    guard = torch._C._AutoDispatchBelowADInplaceOrView()
    guard.__enter__()
    try:
        done = kernel(*args, **kwargs)
        if not isinstance(done, Write):
            return done
        to, at, rows, result = done
        to[at] = rows  # the last instruction: see Write
        return result
    except BaseException:
        guard.__exit__(None, None, None)  # now, and not when the traceback goes
        raise


for _name in OPERATORS:
    library.impl(_name, functools.partial(_load_and_call, _name), "CompositeExplicitAutograd")

_HOST = torch.empty(0, device="cpu")
_LARGE_OUTPUT = 4 << 20
"""Bytes from which on the operator does more than torch.empty, which is quicker to call."""


def empty_output(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """An uninitialised output of a lookup, float32 `shape`.

    A large one on the CPU takes over the memory of one that is gone: `torch_npu_ext/ops/output_memory.h`.
    """
    if device.type == "cpu" and 4 * shape[0] * shape[1] >= _LARGE_OUTPUT:
        return cast("torch.Tensor", ops.empty_output(_HOST, *shape))
    return torch.empty(shape, dtype=torch.float32, device=device)


# Without a frame of Python between caller and operator: they cost less, and `tbe.cache.update_journal` needs it.
lookup_pooled: Callable[..., None] = ops.lookup_pooled.default._op
lookup_sequence: Callable[..., torch.Tensor] = ops.lookup_sequence.default._op
update_rows: Callable[..., None] = ops.update_rows.default._op
accumulate_rows: Callable[..., None] = ops.accumulate_rows.default._op
