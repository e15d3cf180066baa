"""The operators `torch.ops.rec_sdk.*`: their schemas, fake kernels (shapes for tracing) and library of kernels.

`op_kernels/<operator>/README.md` describes shapes, dtypes and orders of summation. All tensors of a call are on one
device, except that copied rows may be in pinned host memory if the cache is on CUDA.

The operators have no autograd registration, because the fused update changes the cache in place. A lookup has only one
gradient, with respect to `per_sample_weights`; the operator `pooled_weights_grad` computes it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

__all__ = [
    "OPERATORS",
    "coefficient_names",
    "cpu_isa",
    "library",
    "load_kernels",
    "ops",
    "parallel_runner",
    "select_cpu_isa",
]


_PATH = Path(__file__).parents[1] / "_ops.so"
if not _PATH.exists():
    raise ImportError(
        f"rec_sdk_torch is not built: {_PATH} is missing. Build it in the repository with "
        "`pip install -e . --no-build-isolation`, or install a wheel."
    )


def load_kernels(path: Path) -> None:
    """Loads a shared library with kernels of the operators that this module declares.

    Raises:
        OSError: the library does not load with this version of torch.
    """
    torch.ops.load_library(str(path))


load_kernels(_PATH)
ops = torch.ops.rec_sdk
"""The loaded operators, typed as Any: `ops.lookup_sequence(...)`."""
_library = ctypes.CDLL(str(_PATH))
_library.rec_sdk_cpu_isa.restype = ctypes.c_char_p
_library.rec_sdk_select_cpu_isa.argtypes = [ctypes.c_char_p]
_library.rec_sdk_coefficient_names.argtypes = [ctypes.c_char_p]
_library.rec_sdk_coefficient_names.restype = ctypes.c_char_p


def parallel_runner() -> tuple[int, int]:
    """Returns two addresses of C functions for `_engine.set_parallel_runner`.

    The first function runs work on torch's threads; the second returns the number of torch's threads.
    """
    functions = _library.rec_sdk_run_pieces, _library.rec_sdk_thread_count
    runner, threads = (cast("int", ctypes.cast(function, ctypes.c_void_p).value) for function in functions)
    return runner, threads


COEFFICIENTS = 16
"""Number of columns of the argument `coefficients` of `rec_sdk::update_rows`, which has a row for each table."""


def coefficient_names(optimizer: str) -> list[str]:
    """Returns the names of an optimizer's coefficients in `update_rows`, in the order of their columns from column 1.

    Raises:
        ValueError: there is no optimizer of this name.
    """
    names: bytes | None = _library.rec_sdk_coefficient_names(optimizer.encode())
    if names is None:
        raise ValueError(f"no optimizer {optimizer!r} in update_rows")
    return names.decode().split()


def cpu_isa() -> str:
    """Returns the instruction set that the CPU kernels use: "baseline", "x86_64_v3" or "x86_64_v4"."""
    name: bytes = _library.rec_sdk_cpu_isa()
    return name.decode()


def select_cpu_isa(name: str = "") -> None:
    """Selects the CPU kernels compiled for an instruction set; "" selects the best one. Results do not change.

    Raises:
        ValueError: this build or this machine does not support the instruction set.
    """
    if not _library.rec_sdk_select_cpu_isa(name.encode()):
        raise ValueError(f"no CPU kernels for {name!r} in this build or on this machine; in use: {cpu_isa()!r}")


library = torch.library.Library("rec_sdk", "FRAGMENT")
OPERATORS: list[str] = []
"""Names of the operators that require a kernel, including overloads."""


def _check_devices(name: str, tensors: dict[str, object], host_rows: tuple[str, ...]) -> None:
    """Checks that all tensors are on one device. Calls with a meta tensor need it, as they run only the fake kernel.

    Args:
        name: the name of the operator.
        tensors: the arguments by name; values that are neither tensors nor lists of tensors are ignored.
        host_rows: names of arguments that may be on the host if the others are on CUDA.

    Raises:
        RuntimeError: a tensor is not on the device of the first one.
    """
    each: list[tuple[str, torch.Tensor]] = []
    for key, value in tensors.items():
        if isinstance(value, torch.Tensor):
            each.append((key, value))
        elif isinstance(value, list | tuple):
            each.extend((f"{key}[{i}]", tensor) for i, tensor in enumerate(value))
    device = each[0][1].device
    for key, tensor in each:
        on_host = key in host_rows and device.type == "cuda" and tensor.device.type == "cpu"
        if tensor.device != device and not on_host:
            raise RuntimeError(
                f"rec_sdk::{name}: {key} must be on the device of the first argument, {device}, got {tensor.device}"
            )


def _operator(schema: str, fake: Callable[..., torch.Tensor] | None = None, host_rows: tuple[str, ...] = ()) -> None:
    """Declares an operator.

    Args:
        schema: the name, arguments and results of the operator.
        fake: a function that takes the named arguments and returns an empty result for tracing; None if the operator
            only writes in place.
        host_rows: names of arguments that may be on the host if the others are on CUDA.
    """
    name = schema.partition("(")[0]
    parameters = [argument.name for argument in torch._C.parse_schema(f"rec_sdk::{schema}").arguments]

    def checked(*args: object, **kwargs: object) -> torch.Tensor | None:
        arguments = dict(zip(parameters, args, strict=False)) | kwargs
        _check_devices(name, arguments, host_rows)
        return fake(**arguments) if fake else None

    library.define(schema)
    torch.library.register_fake(f"rec_sdk::{name}", checked, lib=library)
    OPERATORS.append(name)


def _empty_output(like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return like.new_empty((rows, columns), dtype=torch.float32)


# A composite operator for all devices: it computes nothing, so no device needs a kernel.
library.define("empty_output(Tensor like, int rows, int columns) -> Tensor")
torch.library.register_fake("rec_sdk::empty_output", _empty_output, lib=library)
library.impl("empty_output", _empty_output, "CompositeExplicitAutograd")

_operator(
    "lookup_sequence(Tensor weights, Tensor slots) -> Tensor",
    lambda weights, slots: _empty_output(weights, slots.shape[0], weights.shape[1]),
)
_operator(
    "lookup_pooled(Tensor weights, Tensor slots, Tensor offsets, Tensor? per_sample_weights, Tensor columns, "
    "Tensor mean, int first_bag, Tensor(a!) out) -> ()"
)
_operator(
    "pooled_weights_grad(Tensor weights, Tensor slots, Tensor offsets, Tensor grad, Tensor columns, Tensor mean) "
    "-> Tensor",
    lambda weights, slots, **_: weights.new_empty(slots.shape[:1], dtype=torch.float32),
)
_operator(
    "update_rows(Tensor(a!) cache, Tensor[] grads, Tensor unique_slots, Tensor table_offsets, Tensor segment_offsets, "
    "Tensor grad_row, Tensor? grad_source, Tensor? grad_column, Tensor? scale, Tensor coefficients, str optimizer, "
    "int dim, ScalarType weight_dtype, Tensor? row_ids=None, Tensor? rounding_seeds=None, int[] state_dtypes=[], "
    "Tensor? hot_segments=None, Tensor(b!)? row_norms=None) -> ()"
)
_operator(
    "accumulate_rows(Tensor(a!) pending, Tensor[] grads, Tensor unique_slots, Tensor segment_offsets, "
    "Tensor grad_row, Tensor? grad_source, Tensor? grad_column, Tensor? scale, Tensor? hot_segments=None) -> ()"
)
_operator(
    "gather_rows(Tensor cache, Tensor slots) -> Tensor",
    lambda cache, slots: cache.new_empty((slots.shape[0], cache.shape[1])),
)
_operator("gather_rows.out(Tensor cache, Tensor slots, *, Tensor(a!) out) -> ()", host_rows=("out",))
_operator("scatter_rows(Tensor(a!) cache, Tensor slots, Tensor rows) -> ()", host_rows=("rows",))
_operator(
    "swap_rows(Tensor(a!) cache, Tensor slots, Tensor victim_indices, Tensor rows, Tensor(b!) victims) -> ()",
    host_rows=("rows", "victims"),
)
_operator(
    "swap_lookup_sequence(Tensor(a!) cache, Tensor slots, Tensor? victim_indices, Tensor rows, Tensor(b!)? victims, "
    "int dim, ScalarType weight_dtype, Tensor lookup_slots, Tensor origins) -> Tensor",
    lambda cache, dim, lookup_slots, **_: _empty_output(cache, lookup_slots.shape[0], dim),
)
_operator(
    "swap_lookup_pooled(Tensor(a!) cache, Tensor slots, Tensor? victim_indices, Tensor rows, Tensor(b!)? victims, "
    "int dim, ScalarType weight_dtype, Tensor lookup_slots, Tensor origins, Tensor offsets, "
    "Tensor? per_sample_weights, Tensor columns, Tensor mean, int first_bag, Tensor(c!) out) -> ()"
)
