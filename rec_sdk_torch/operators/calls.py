"""Functions that call the operators.

The first call on a device loads the kernels of the device's backend. If the backend has no kernel for the operator, the
default kernel in plain torch runs.
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


def call_once(operator: Any, arguments: Sequence[object], result: list[Any]) -> None:
    """Calls an operator and appends its result to `result`; does nothing if `result` has an element already.

    No signal handler, such as the handler of Ctrl-C, runs between the call and the append, since both happen in C code.
    So after an interrupt, `result` shows whether the operator ran.

    Args:
        operator: an overload of an operator, such as `ops.update_rows.default`.
        arguments: the positional arguments.
        result: an empty list at first; pass the same list to repeat an interrupted call.
    """
    if not result:
        result.extend(map(operator._op, *zip(arguments)))


_loaded: set[str] = set()
"""Device types whose kernels are loaded."""


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


@functools.cache
def _default_kernel(name: str, device_type: str) -> Callable[..., Any]:
    """Returns the operator's kernel in plain torch, and warns once for each device type that it is slow."""
    warn(
        f"rec_sdk::{name}: this build of rec_sdk_torch has no kernel of it for device {device_type!r}; torch's own "
        "operators are used instead, which is slow",
        PerformanceWarning,
    )
    return KERNELS[name]


def _load_and_call(name: str, *args: Any, **kwargs: Any) -> Any:
    """Runs an operator for which torch has no kernel on the device of its tensors.

    Loads the kernels of the device's backend, and calls the operator again. If the backend has no kernel for it, or the
    device has no backend, runs the default kernel in plain torch. Without this function, torch_npu would run the CPU's
    kernels on copies of the tensors.

    Raises:
        ImportError, ValueError: see `devices.backends.load_operators`.
        NotImplementedError: a tensor is not strided.
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
        if not _is_strided(each):
            raise NotImplementedError(f"rec_sdk::{name} takes strided tensors, got one that is {each.layout}")
    kernel = _default_kernel(name, tensor.device.type)
    # With this guard, as in a C++ kernel, autograd records nothing and inference tensors can be written.
    guard = torch._C._AutoDispatchBelowADInplaceOrView()
    guard.__enter__()
    try:
        done = kernel(*args, **kwargs)
        if not isinstance(done, Write):
            return done
        to, at, rows, result = done
        to[at] = rows  # only the return may follow the write, see `Write`
        return result
    except BaseException:
        guard.__exit__(None, None, None)  # needed because the traceback keeps the guard alive
        raise


for _name in OPERATORS:
    library.impl(_name, functools.partial(_load_and_call, _name), "CompositeExplicitAutograd")

_HOST = torch.empty(0, device="cpu")
_LARGE_OUTPUT = 4 << 20
"""Size in bytes from which `ops.empty_output` allocates an output. Below it, torch.empty is faster."""


def empty_output(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Returns an uninitialised float32 tensor for the output of a lookup.

    On the CPU, a large tensor reuses the memory of a deleted output; see `torch_npu_ext/ops/output_memory.h`.
    """
    if device.type == "cpu" and 4 * shape[0] * shape[1] >= _LARGE_OUTPUT:
        return cast("torch.Tensor", ops.empty_output(_HOST, *shape))
    return torch.empty(shape, dtype=torch.float32, device=device)


# These call the operator without a Python frame in between, which is faster and required by `tbe.cache.update_journal`.
lookup_pooled: Callable[..., None] = ops.lookup_pooled.default._op
lookup_sequence: Callable[..., torch.Tensor] = ops.lookup_sequence.default._op
update_rows: Callable[..., None] = ops.update_rows.default._op
accumulate_rows: Callable[..., None] = ops.accumulate_rows.default._op
