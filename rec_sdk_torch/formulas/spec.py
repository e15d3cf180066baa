"""The form in which an optimizer is written down: its formula, and what the host side knows of it."""

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
    """One state block of the row record: `[D]`, or `[1]` when `rowwise`; a `counter` is always float32."""

    name: str
    rowwise: bool = False
    counter: bool = False

    def elements(self, dim: int) -> int:
        """Numbers of a row of `dim` columns."""
        return 1 if self.rowwise else dim


@dataclass(frozen=True)
class Formula:
    """An update of rows, which each backend's kernel and a function in plain torch compute with the same bits.

    Attributes:
        kernel: its name in `rec_sdk::update_rows`.
        update: the function in plain torch, which changes the weights and states of rows.
        coefficients: names of a table's coefficients, from `[1]` on, as in the kernel's struct.
        states: the state blocks of a row, in the order of the record: blocks of `[D]` come first.
        undecayed: the kernel without weight decay whose states mean the same; "" where there is none.
    """

    kernel: str
    update: Callable[[Rows], None]
    coefficients: str
    states: tuple[StateSpec, ...] = ()
    undecayed: str = ""

    def state_elements(self, dim: int) -> tuple[int, ...]:
        """Elements of each state of a row."""
        return tuple(state.elements(dim) for state in self.states)


@dataclass(frozen=True)
class TablePass:
    """Work that an optimizer does on all rows of its tables, some at a time, before an update.

    Attributes:
        parts: the parts of a row that it reads: `weight`, or names of states.
        due: (options, t) -> whether it has something to do before update t.
        rows: (options, t, parts) -> nothing, having changed the parts in place; or a number, of which the greatest
            plus 1 becomes the `option`, and the rows stay.
        option: see `rows`; None where rows change.
    """

    parts: tuple[str, ...]
    due: Callable[[Options, int], bool]
    rows: Callable[[Options, int, dict[str, torch.Tensor]], float | None]
    option: str | None = None


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer as the host side knows it.

    Attributes:
        formula: the update of its rows.
        family: classes of one family count as the same optimizer in the check against a table's
            `embedding_optimizer_cls`.
        classes: qualified names of the classes that mean it.
        options: keywords the update honours, with their defaults (those of the torch class).
        coefficients: (options, t) -> the coefficients that the formula names, in double precision.
        window_class: qualified name of the Accumulate class, where there is one.
        accumulates: an Accumulate variant, with `use_accumulate` and `accumulate_step`.
        when: whether keywords mean this spec, of those of the class; the last whose answer is yes counts.
        example: keywords for which `when` says yes; benchmarks run with them.
        table_pass: work on whole tables, perhaps before each update.
        modes: for each option that names a mode, the modes that it may have, and change between.
        neutral: keywords of the class that may only have these values, in place of those that all classes have.
        problem: (options) -> a sentence on options that do not go together, or None.
        collects_gradients: gradients are summed until a call takes them; no update is made, and no kernel is run.
    """

    formula: Formula
    family: str
    classes: tuple[str, ...]
    options: Options
    coefficients: Callable[[Options, int], Coefficients]
    window_class: str = ""
    accumulates: bool = False
    when: Callable[[Options], bool] = lambda options: True
    example: Options = field(default_factory=dict)
    modes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    problem: Callable[[Options], str | None] = lambda options: None
    collects_gradients: bool = False
    table_pass: TablePass | None = None

    @property
    def kernel(self) -> str:
        """Name of the formula in `rec_sdk::update_rows`."""
        return self.formula.kernel

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """State blocks of a row, in the order of the record."""
        return self.formula.states

    def state_init(self, options: Options) -> list[float]:
        """Initial value of each state block."""
        start = float(options.get("initial_accumulator_value", 0.0))
        return [start if state.name == "sum" else 0.0 for state in self.states]


def with_l2(spec: OptimizerSpec) -> OptimizerSpec:
    """The optimizer with weight decay that joins the gradient, as torch's have it: `WithL2` of the kernels.

    Where the objective grows a coefficient of the spec is negative, so that its gradient keeps its sign: then the decay
    is taken from the gradient.
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
        when=lambda options: bool(options.get("weight_decay")),
        example={"weight_decay": 0.01},
    )


def sign(options: Options) -> float:
    """-1 where the objective grows: by this factor the gradient counts."""
    return -1.0 if options["maximize"] else 1.0


def mode_name(mode: object) -> str | None:
    """The name of a mode, which is given by name or as a member of an FBGEMM enum; None for anything else."""
    name = getattr(mode, "name", mode)
    return name.lower() if isinstance(name, str) else None
