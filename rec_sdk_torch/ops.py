"""The operators `torch.ops.rec_sdk.*`: the loaded library and its fake kernels (shapes for tracing).

Shapes, dtypes and orders of summation: `op_kernels/<operator>/README.md`.

There is no autograd registration. The fused update changes the cache in place, so no gradient of it
exists; the one gradient a lookup has, that of `per_sample_weights`, is the operator `pooled_weights_grad`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

import torch

__all__ = ["cpu_isa", "ops", "parallel_runner", "select_cpu_isa"]


_PATH = Path(__file__).with_name("_ops.so")
if not _PATH.exists():
    raise ImportError(
        f"rec_sdk_torch is not built: {_PATH} is missing. Build it in the repository with "
        "`pip install -e . --no-build-isolation`, or install a wheel."
    )
torch.ops.load_library(str(_PATH))
ops = torch.ops.rec_sdk
"""The loaded operators, typed as Any: `ops.lookup_sequence(...)`."""
_library = ctypes.CDLL(str(_PATH))
_library.rec_sdk_cpu_isa.restype = ctypes.c_char_p
_library.rec_sdk_select_cpu_isa.argtypes = [ctypes.c_char_p]


def parallel_runner() -> tuple[int, int]:
    """For `_engine.set_parallel_runner`: addresses of the functions that run work on torch's threads and count them."""
    functions = _library.rec_sdk_run_pieces, _library.rec_sdk_thread_count
    runner, threads = (cast("int", ctypes.cast(function, ctypes.c_void_p).value) for function in functions)
    return runner, threads


def cpu_isa() -> str:
    """The instruction set the CPU kernels use: "baseline", "x86_64_v3" or "x86_64_v4"."""
    name: bytes = _library.rec_sdk_cpu_isa()
    return name.decode()


def select_cpu_isa(name: str = "") -> None:
    """Uses the CPU kernels compiled for `name`; "" takes the best. The bits of every result stay the same.

    Raises ValueError when this build or machine lacks them.
    """
    if not _library.rec_sdk_select_cpu_isa(name.encode()):
        raise ValueError(f"no CPU kernels for {name!r} in this build or on this machine; in use: {cpu_isa()!r}")


_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


def _fake(name: str) -> Callable[[Callable[_Params, _Result]], Callable[_Params, _Result]]:
    """`torch.library.register_fake`, typed."""
    return cast(
        "Callable[[Callable[_Params, _Result]], Callable[_Params, _Result]]",
        torch.library.register_fake(f"rec_sdk::{name}"),
    )


@_fake("lookup_sequence")
def _lookup_sequence(weights: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return weights.new_empty((slots.shape[0], weights.shape[1]), dtype=torch.float32)


@_fake("lookup_pooled")
def _lookup_pooled(
    weights: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
    columns: torch.Tensor,
    mean: torch.Tensor,
    first_bag: int,
    out: torch.Tensor,
) -> None:
    return None


@_fake("pooled_weights_grad")
def _pooled_weights_grad(
    weights: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor,
    grad: torch.Tensor,
    columns: torch.Tensor,
    mean: torch.Tensor,
) -> torch.Tensor:
    return weights.new_empty((slots.shape[0],), dtype=torch.float32)


@_fake("update_rows")
def _update_rows(
    cache: torch.Tensor,
    grads: list[torch.Tensor],
    unique_slots: torch.Tensor,
    table_offsets: torch.Tensor,
    segment_offsets: torch.Tensor,
    grad_row: torch.Tensor,
    grad_source: torch.Tensor | None,
    grad_column: torch.Tensor | None,
    scale: torch.Tensor | None,
    coefficients: torch.Tensor,
    optimizer: str,
    dim: int,
    weight_dtype: torch.dtype,
) -> None:
    return None


@_fake("accumulate_rows")
def _accumulate_rows(
    pending: torch.Tensor,
    grads: list[torch.Tensor],
    unique_slots: torch.Tensor,
    segment_offsets: torch.Tensor,
    grad_row: torch.Tensor,
    grad_source: torch.Tensor | None,
    grad_column: torch.Tensor | None,
    scale: torch.Tensor | None,
) -> None:
    return None


@_fake("gather_rows")
def _gather_rows(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return cache.new_empty((slots.shape[0], cache.shape[1]))


@_fake("gather_rows.out")
def _gather_rows_out(cache: torch.Tensor, slots: torch.Tensor, *, out: torch.Tensor) -> None:
    return None


@_fake("scatter_rows")
def _scatter_rows(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    return None
