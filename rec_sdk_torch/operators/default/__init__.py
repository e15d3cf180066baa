"""Default kernels: the operators in plain torch, slow, for devices whose backend has no kernel for them.

Every sum has the order that the kernels document, and every formula rounds where the kernels round. Results are
bit-identical to the CPU kernels' on devices whose `+ - * /` round as IEEE 754 requires and that have float64, which
square roots need. The default kernels also check the contents of index tensors; for these checks the host waits for the
device.

`KERNELS` maps each operator's name to its function, which has the parameters of the operator's schema. The function of
an operator that must not run twice returns its result as a `Write` instead of writing it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from . import gradients, lookups, moves, swap_lookups, updates
from .write import Write

__all__ = ["KERNELS", "Write"]

KERNELS: Mapping[str, Callable[..., Any]] = {
    "lookup_sequence": lookups.lookup_sequence,
    "lookup_pooled": lookups.lookup_pooled,
    "pooled_weights_grad": lookups.pooled_weights_grad,
    "update_rows": updates.update_rows,
    "accumulate_rows": gradients.accumulate_rows,
    "gather_rows": moves.gather_rows,
    "gather_rows.out": moves.gather_rows_out,
    "scatter_rows": moves.scatter_rows,
    "swap_rows": moves.swap_rows,
    "swap_lookup_sequence": swap_lookups.swap_lookup_sequence,
    "swap_lookup_pooled": swap_lookups.swap_lookup_pooled,
}
