"""With extreme numbers, every optimizer is at least as close to float64 results as its class in float32.

Extreme numbers are gradients whose squares underflow or overflow, betas of 0 or close to 1, and eps or lr of 0. See
"Extreme numbers" in docs/optimizers.md.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import reference_optimizers as formulas
import torch
from op_batches import Cache, default, states_of, update_arguments
from optimizer_table import ROWS, Row, class_named

from rec_sdk_torch.tbe import TableOptimizer

GRADIENTS = (0.0, 1e-40, 1e-20, 1e-4, 1.0, 1e19, 3e38)
LAST = (0.0, 1.0, -3e38)
LEARNING_RATES = ({"lr": 0.0}, {"lr": 0.1}, {"lr": 5.0})
WEIGHTS = ((0.5, -0.25, 0.0, 1e-3), (2e19, -1e-20, 0.0, 0.5))
COLUMNS = (1.0, -1.0, 1 / 3, 0.0)
"""Factors between the gradients of a row's columns."""
BETAS = ((0.0, 0.0), (1e-3, 1e-3), (0.999999, 0.999999), (0.9, 0.999), (0.0, 0.999999), (0.999999, 0.0))

default_update_rows = functools.partial(default, "update_rows")

Parts = list[torch.Tensor]
"""The weight, then the states: `[rows, columns]`, or `[rows, 1]` for a single number per row."""


def options_of(row: Row) -> Iterator[dict[str, Any]]:
    """Yields the keywords to try: the row's own, with extreme betas, eps and lr if its class has them."""
    betas = [{"betas": pair} for pair in BETAS] if "betas" in row.spec.options else [{}]
    eps = [{"eps": 0.0}, {"eps": 1e-8}] if "eps" in row.spec.options else [{}]
    for parts in itertools.product(betas, eps, LEARNING_RATES, row.extremes):
        yield {name: value for part in parts for name, value in part.items()}


def gradients() -> torch.Tensor:
    """Returns gradients `[steps, rows, columns]`: every sequence of two extreme gradients, followed by another
    gradient.
    """
    sequences = torch.tensor(list(itertools.product(GRADIENTS, GRADIENTS, LAST)))
    return (sequences.t()[:, :, None] * torch.tensor(COLUMNS)).repeat(1, len(WEIGHTS), 1)


def parts_of(weight: torch.Tensor, state: dict[str, Any], names: tuple[str, ...]) -> Parts:
    return [weight, *(state[name] for name in names if name in state)]


class ClassReference:
    """The reference: an optimizer class applied to the rows of each table."""

    def __init__(self, cls: type[torch.optim.Optimizer], tables: list[TableOptimizer], weights: torch.Tensor) -> None:
        self.sparse = cls is torch.optim.SparseAdam or issubclass(cls, formulas.RowOptimizer)
        self.states = tuple(state.name for state in tables[0].spec.states)
        self.weights = [torch.nn.Parameter(part) for part in weights.chunk(len(tables))]
        self.optimizers = []
        for weight, table in zip(self.weights, tables, strict=True):
            usual = {name: 1.0 if name in ("lr", "eps") else value for name, value in table.options.items()}
            optimizer = cls([weight], **usual)  # type: ignore[call-arg]
            optimizer.param_groups[0].update(table.options)  # SparseAdam's constructor refuses an lr and an eps of 0
            self.optimizers.append(optimizer)

    @torch.no_grad()
    def step(self, before: Parts, g: torch.Tensor) -> Parts:
        """Returns the parts of all tables after an update of `before`."""
        g = g.to(self.weights[0].dtype)
        parts = []
        tables = zip(*(part.chunk(len(self.weights)) for part in before), strict=True)
        for weight, optimizer, start in zip(self.weights, self.optimizers, tables, strict=True):
            weight.grad = formulas.of_all_rows(g) if self.sparse else g
            state = optimizer.state[weight]
            now = parts_of(weight, state, self.states)
            for part, value in zip(now, start, strict=False):  # the first step creates states
                part.copy_(value)
            optimizer.step()
            parts.append([part.clone() for part in parts_of(weight, state, self.states)])
        return [torch.cat(part) for part in zip(*parts, strict=True)]


class Tables:
    """One table for each set of options, in one cache; all have the same weights and gradients.

    `update` is the operator update_rows or a replacement.
    """

    def __init__(
        self,
        optimizers: list[TableOptimizer],
        weights: torch.Tensor,
        device: torch.device,
        update: Callable[..., object] = torch.ops.rec_sdk.update_rows,
    ) -> None:
        self.optimizers, self.kernel, self.update = optimizers, optimizers[0].spec.kernel, update
        self.rows, self.dim = weights.shape
        count = len(optimizers) * self.rows
        states = [torch.zeros(count, n) for n in states_of(self.kernel, self.dim)]
        self.cache = Cache(weights.repeat(len(optimizers), 1), states, device=device)

    def step(self, g: torch.Tensor) -> Parts:
        """Returns the parts of all tables after the update."""
        device, tables = self.cache.records.device, len(self.optimizers)
        every = torch.arange(tables * self.rows + 1, dtype=torch.int32, device=device)
        segments = {
            "unique_slots": every[:-1],
            "table_offsets": every[:: self.rows].contiguous(),
            "segment_offsets": every,
            "grad_row": every[: self.rows].repeat(tables),
        }
        row = torch.tensor([optimizer.coefficients() for optimizer in self.optimizers]).to(device)
        self.update(**update_arguments(self.cache, [g.to(device)], self.kernel, row, **segments))
        return self.parts()

    def parts(self) -> Parts:
        return [part.cpu().clone() for part in (self.cache.weights, *self.cache.states)]


def check(found: Parts, exact: Parts, single: Parts, nudged: Parts, before: Parts, kept: torch.Tensor) -> None:
    """Checks that each number is as close to `exact` as `single` (the class in float32), or is not finite in both.

    Where terms cancel, the error of a single number is random, and another processor rounds differently. So it suffices
    to be as close as `nudged`, the class in float32 with `before` perturbed by a rounding.

    Where only `single` is not finite, the number must be no further from `exact` than `before` is, except for decay.
    `kept` is the fraction of a state that an update keeps.
    """
    for part, all_of_part in enumerate(zip(found, exact, single, nudged, before, strict=True)):
        ours, right, rough, other, old = (numbers.double() for numbers in all_of_part)
        error = (rough - right).abs().maximum((other - right).abs().nan_to_num(posinf=0.0))
        bound = 1e-5 * (right.abs() + old.abs() * (kept if part else 1.0)) + 1e-44
        slack = torch.where(rough.isfinite(), 4 * error, (old - right).abs() + old.abs())
        wrong = ~((ours - right).abs() <= bound + slack) & (rough.isfinite() | ours.isfinite())
        if wrong.any():
            row, column = wrong.nonzero()[0].tolist()
            values = (numbers[row, column].item() for numbers in (old, ours, right, rough))
            text = "row {}, column {}: {} becomes {}, in float64 {}, in float32 {}".format(row, column, *values)
            raise AssertionError(f"part {part}, {text}; {wrong.sum()} such numbers")


def perturbed(parts: Parts) -> Parts:
    """Shifts the parts alternately up and down by one rounding error, so that errors of cancelling terms add up."""
    shift = 2.0**-23
    return [part * (1 - shift if place % 2 else 1 + shift) for place, part in enumerate(parts)]


def without_nonfinite(parts: Parts, weights: torch.Tensor, rowwise: bool) -> Parts:
    """Returns the parts with zeros for elements, or rows, whose weight is not finite: their states are meaningless."""
    dead = ~weights.isfinite()
    if rowwise:
        dead = dead.any(dim=1, keepdim=True)
    return [part.masked_fill(dead, 0) for part in parts]


def all_bits(parts: Parts) -> torch.Tensor:
    """Returns the bits of all parts, with one representation of NaN."""
    joined = torch.cat([part.flatten() for part in parts])
    return torch.where(joined.isnan(), torch.nan, joined).view(torch.int32)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_never_worse_than_its_class(row: Row, device: torch.device) -> None:
    steps = gradients()
    optimizers = [TableOptimizer.create(class_named(row.cls), options) for options in options_of(row)]
    assert {optimizer.spec.kernel for optimizer in optimizers} == {row.spec.kernel}
    weights = torch.tensor(WEIGHTS).repeat_interleave(steps.shape[1] // len(WEIGHTS), 0)
    in_torch = Tables(optimizers, weights, torch.device("cpu"), default_update_rows)
    on_device = Tables(optimizers, weights, device)
    before = in_torch.parts()
    exact = ClassReference(row.exact or row.reference, optimizers, before[0].double())
    single, nudged = (ClassReference(row.reference, optimizers, before[0]) for _ in range(2))
    kept = torch.tensor([max(optimizer.options.get("betas", (1.0,))) for optimizer in optimizers])
    kept = kept.repeat_interleave(len(weights))[:, None]
    for t, g in enumerate(steps, 1):
        found = on_device.step(g)
        assert torch.equal(all_bits(found), all_bits(in_torch.step(g))), "other bits than the formula in plain torch"
        of_class = (exact.step(before, g), single.step(before, g), nudged.step(perturbed(before), g))
        rowwise = issubclass(row.reference, formulas.RowOptimizer)
        check(*(without_nonfinite(parts, before[0], rowwise) for parts in (found, *of_class, before)), kept)
        before = found
        for optimizer in optimizers:
            optimizer.step = t
