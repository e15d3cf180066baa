"""The operators in plain torch, for devices whose backend has no kernel for them. Any device, slow, the kernels' bits.

Every sum has the order that the kernels document, and every formula rounds where theirs do, so that the bits are those
of the CPU, where torch's own `+ - * /` on the device round as IEEE says, and it has float64 (for square roots). They
also look at the contents of index tensors, which waits for the device.

`KERNELS` has an operator's function by its name, with the parameters of its schema. One that must not run twice does
not write, but returns what is to be written (`write.py`).
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
