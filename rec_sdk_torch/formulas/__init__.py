"""The optimizers of `update_rows`: the formula of each in plain torch, its coefficients, and its `OptimizerSpec`.

Devices without a kernel compute updates with the formula. It is also the reference for the kernels in
`op_kernels/common/optimizers.h`, whose results are bit-identical. To that end:

- A formula computes in the order of the kernel: `a * b / c` is `(a * b) / c`.
- It does not use torch's fused operators (`addcmul`, an `alpha` argument), which may round once where a kernel rounds
  twice.

docs/optimizers.md shows the formulas in mathematical notation.
"""

from .optimizers import FORMULAS, SPECS, UPDATES, class_name, modes_of, same_states, spec_for, specs_of_class
from .rows import Coefficients, Rows
from .spec import Formula, OptimizerSpec, Options, StateSpec, TablePass, mode_name

__all__ = [
    "FORMULAS",
    "SPECS",
    "UPDATES",
    "Coefficients",
    "Formula",
    "OptimizerSpec",
    "Options",
    "Rows",
    "StateSpec",
    "TablePass",
    "class_name",
    "mode_name",
    "modes_of",
    "same_states",
    "spec_for",
    "specs_of_class",
]
