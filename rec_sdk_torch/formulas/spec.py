"""The description of an optimizer: its formula, and the options that the host side handles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .rows import Rows

Options = Mapping[str, Any]
Coefficients = dict[str, float]

TORCHREC = "torchrec.optim.optimizers"
ACCUMULATE = "rec_sdk_torch.optim.accumulate"
ACCUMULATE_TORCHREC = "rec_sdk_torch.optim.accumulate_torchrec"


@dataclass(frozen=True)
class StateSpec:
    """One state block of a row: `[D]`, or `[1]` if `rowwise`. A `counter` is float32 whatever `state_dtypes` is."""

    name: str
    rowwise: bool = False
    counter: bool = False

    def elements(self, dim: int) -> int:
        """Returns the number of elements for a row of `dim` columns."""
        return 1 if self.rowwise else dim


@dataclass(frozen=True)
class Formula:
    """An update of rows. The kernel of each backend and the function in plain torch give bit-identical results.

    Attributes:
        kernel: the name of the formula in `rec_sdk::update_rows`.
        update: the function in plain torch, which assigns new weights and states.
        coefficients: the names of a table's coefficients, separated by spaces, in the order of the kernel's struct.
            The first one is in column 1.
        states: the state blocks of a row, in the order of the record: blocks of `[D]` come first.
        undecayed: the name of the kernel without weight decay that has the same states; "" if there is none.
    """

    kernel: str
    update: Callable[[Rows], None]
    coefficients: str
    states: tuple[StateSpec, ...] = ()
    undecayed: str = ""

    def state_elements(self, dim: int) -> tuple[int, ...]:
        """Returns the number of elements of each state of a row with `dim` columns."""
        return tuple(state.elements(dim) for state in self.states)


@dataclass(frozen=True)
class TablePass:
    """A pass of an optimizer over all rows of its tables, made in chunks before some updates.

    A pass either changes the rows, or computes a number from them and sets an option to it.

    Attributes:
        parts: the parts of a row that the pass reads: `weight`, or names of states.
        due: (options, t) -> whether the pass must be made before update number t.
        rows: (options, t, parts) -> result for one chunk. If `option` is None, the function changes the parts in place
            and returns None. Otherwise it returns a number, and the option is set to 1 plus the largest number of all
            chunks.
        option: the name of the option that the pass sets; None if the pass changes rows.
    """

    parts: tuple[str, ...]
    due: Callable[[Options, int], bool]
    rows: Callable[[Options, int, dict[str, torch.Tensor]], float | None]
    option: str | None = None


@dataclass(frozen=True)
class OptimizerSpec:
    """The host side's description of an optimizer.

    Attributes:
        formula: the update of rows.
        family: the name of the optimizer's family. A table's `embedding_optimizer_cls` accepts any class of the same
            family.
        classes: qualified names of the optimizer classes.
        options: the supported keywords with their defaults, which are the defaults of torch's class.
        coefficients: (options, t) -> the formula's coefficients for update number t, as Python floats by name.
        accumulate_class: qualified name of the Accumulate class; "" if there is none.
        accumulates: whether this is an Accumulate variant, with the options `use_accumulate` and `accumulate_step`.
        applies_to: (keywords) -> whether the keywords select this spec. A class may have several specs; the last one
            that applies is used.
        example: keywords to which this spec applies, for tests and benchmarks.
        table_pass: work on all rows of the tables before some updates; None: there is none.
        modes: for each option that names a mode, the allowed modes; the option may change between them.
        neutral: for unsupported keywords of the class, the values that are accepted nevertheless, where these differ
            from the usual neutral values.
        problem: (options) -> a sentence that names options that exclude each other, or None.
        collects_gradients: whether gradients are only summed, until the user takes them; there is no update and no
            update kernel.
    """

    formula: Formula
    family: str
    classes: tuple[str, ...]
    options: Options
    coefficients: Callable[[Options, int], Coefficients]
    accumulate_class: str = ""
    accumulates: bool = False
    applies_to: Callable[[Options], bool] = lambda options: True
    example: Options = field(default_factory=dict)
    modes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    problem: Callable[[Options], str | None] = lambda options: None
    collects_gradients: bool = False
    table_pass: TablePass | None = None

    @property
    def kernel(self) -> str:
        """The name of the formula in `rec_sdk::update_rows`."""
        return self.formula.kernel

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """The state blocks of a row, in the order of the record."""
        return self.formula.states

    def state_init(self, options: Options) -> list[float]:
        """Returns the initial value of each state block."""
        start = float(options.get("initial_accumulator_value", 0.0))
        return [start if state.name == "sum" else 0.0 for state in self.states]


def with_l2(spec: OptimizerSpec) -> OptimizerSpec:
    """Returns `spec` with torch's weight decay (L2), which adds `weight_decay * w` to the gradient.

    The kernels call this optimizer `WithL2`. With `maximize`, a spec negates a coefficient instead of the gradient, so
    the decay is subtracted from the gradient.
    """
    formula = spec.formula

    def update(r: Rows) -> None:
        r.g = r.g + r.c.l2 * r.w
        formula.update(r)

    def coefficients(options: Options, t: int) -> Coefficients:
        return {**spec.coefficients(options, t), "l2": sign(options) * options["weight_decay"]}

    return replace(
        spec,
        formula=Formula(
            f"decayed_{formula.kernel}", update, f"{formula.coefficients} l2", formula.states, formula.kernel
        ),
        options={**spec.options, "weight_decay": 0.0},
        coefficients=coefficients,
        applies_to=lambda options: bool(options.get("weight_decay")),
        example={"weight_decay": 0.01},
    )


def sign(options: Options) -> float:
    """Returns the factor of the gradient: -1 if the optimizer maximizes, else 1."""
    return -1.0 if options["maximize"] else 1.0


def mode_name(mode: object) -> str | None:
    """Returns the lower-case name of a mode, a string or a member of an FBGEMM enum; None for other objects."""
    name = getattr(mode, "name", mode)
    return name.lower() if isinstance(name, str) else None
