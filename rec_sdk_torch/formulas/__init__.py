"""The optimizers of `update_rows`: for each its formula in plain torch, its coefficients, and its `OptimizerSpec`.

The formula is the operator on devices without a kernel, and the reference of the kernels, whose structs are in
`op_kernels/common/optimizers.h`: it rounds where they round, so that both have the same bits. So a formula is written
in their order, `a * b / c` being `(a * b) / c`; and it does not use torch's fused operators (`addcmul`, an `alpha`),
which may round once where the kernels round twice. In words, formulas are in the optimizers page of the docs.
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
