"""Activation checkpointing: a lookup that torch runs again reads the same rows, and does not count as a lookup."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ...operators.calls import empty_output
from ...runtime.exits import calling_thread
from ..cache.batch import Batch
from ..rows.parameter_edges import graph_task
from .outputs import split_apart
from .step import Step

saved_tensors_hooks: Callable[[bool], tuple[Callable[..., Any], Callable[..., Any]] | None] = (
    torch._C._autograd._top_saved_tensors_default_hooks
)
"""Returns the innermost hooks on saved tensors, such as activation checkpointing sets; None without hooks."""


def _checkpoint_frame(pack: Callable[..., Any]) -> tuple[Any, bool]:
    """Returns torch's frame object of a checkpointed region, and whether the region is run again.

    Args:
        pack: the pack hook on saved tensors. If torch.utils.checkpoint has not set the hook, the frame is None.

    Raises:
        RuntimeError: the hooks of this version of torch have an unknown form.
    """
    function = inspect.unwrap(pack)
    if getattr(function, "__module__", None) != "torch.utils.checkpoint":
        return None, False
    # Torch has no API for this: the closures of its hooks differ between the first run and a repetition.
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if "target_frame_ref" in cells:
        return cells["target_frame_ref"].cell_contents(), True
    if "frame" in cells:
        return cells["frame"].cell_contents, False
    raise RuntimeError(
        f"activation checkpointing of torch {torch.__version__} around a lookup of tables: its second run cannot be "
        "told from its first, and would count ids twice. Use use_reentrant=True, or leave lookups out of the function"
    )


class Recomputations:
    """The steps of lookups inside checkpointed regions, kept while torch may run the regions again."""

    def __init__(self) -> None:
        self._steps: WeakKeyDictionary[Any, list[tuple[Batch, Step]]] = WeakKeyDictionary()
        self._lookups: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def add(self, pack: Callable[..., Any], batch: Batch, step: Step) -> None:
        """Stores the step of a lookup for as long as torch keeps the checkpointed region that contains the lookup.

        Args:
            pack: the innermost pack hook on saved tensors.
            batch: the lookups.
            step: the step of the batch, whose forward has not run yet.
        """
        frame, _ = _checkpoint_frame(pack)
        if frame is not None:
            step.keeps_rows_for_recompute = True
            self._steps.setdefault(frame, []).append((batch, step))

    def find_step(self, pack: Callable[..., Any], batch: Batch) -> Step | None:
        """Returns the earlier step that a lookup repeats; None if the lookup repeats no earlier one.

        Args:
            pack: the innermost pack hook on saved tensors.
            batch: the lookups.

        Raises:
            RuntimeError: the checkpointed function looks up a different batch than in its first run.
        """
        frame, again = _checkpoint_frame(pack)
        if frame is None or not (again or graph_task() != -1):
            return None
        if not again:  # this is a new region inside a region that is run again
            step = self._latest_step(batch)
            if step is not None:
                self._steps.setdefault(frame, []).append((batch, step))
            return step
        steps, number = self._steps.get(frame, ()), self._lookups.get(pack, 0)
        self._lookups[pack] = number + 1
        if number >= len(steps) or not steps[number][0].same_plan(batch):
            raise RuntimeError(
                "activation checkpointing runs a function again, and it looks up another batch of tables than before, "
                "or tables that did not train then. Give checkpoint() the batch as an argument, keep model.train() or "
                "model.eval() until the backward pass, and draw no ids inside the function"
            )
        return steps[number][1]

    def _latest_step(self, batch: Batch) -> Step | None:
        entries = [entry for steps in self._steps.values() for entry in steps]
        return next((step for known, step in reversed(entries) if not step.finished and known.same_plan(batch)), None)


class RecomputedStep(Step):
    """A step of a recomputed forward: it reads the rows that the original step read, and does not train them."""

    def __init__(self, step: Step) -> None:
        """Copies the original step's plans and options.

        Raises:
            RuntimeError: the rows of the original step have already been updated.
        """
        if step.finished:
            raise RuntimeError(
                "activation checkpointing runs a lookup again whose rows were updated meanwhile: a "
                "checkpointed lookup allows one backward pass, or with update='step' several before step()"
            )
        vars(self).update(vars(step), _forward_thread=calling_thread(), _calls=[], _call_results=[])
        self._step = step  # this reference keeps the original step alive, whose deletion would unpin the rows
        self.many_backwards = step.many_backwards

    def release(self) -> None:
        """Does nothing: the original step holds the pins."""

    def forward(
        self, weights: Sequence[torch.Tensor | None], device: torch.device, weights_grad: bool
    ) -> tuple[torch.Tensor, ...]:
        """Returns the rows with the values that the original step's forward read; see `Step.forward`."""
        out = None if self._shape is None else empty_output(self._shape, device)
        outputs: list[torch.Tensor] = []
        self._locks.catch_up()
        with self._locks.launch:
            self._locks.complete()
            for index, (group, plan) in enumerate(zip(self._groups, self._plans, strict=True)):
                rows = group.lookup_resident(
                    plan, weights[index] if weights else None, out, self._row_copies.get(index)
                )
                if self._lengths is not None and len(self._lengths[index]) > 1:
                    outputs += split_apart(rows, self._lengths[index])
                else:
                    outputs.append(rows)
        return tuple(outputs) if out is None else (out,)

    def backward(
        self,
        grads: Sequence[torch.Tensor | None],
        weights: Sequence[torch.Tensor | None],
        needs_grad: Sequence[bool],
        tables: frozenset[str] | None = None,
    ) -> list[torch.Tensor | None]:
        """Returns the gradients of the per-sample weights, for a backward pass inside the checkpointed function.

        Raises:
            RuntimeError: the pass would train the tables, but the backward pass of the first run trains them.
        """
        if tables is None or tables:
            raise RuntimeError(
                "a backward pass inside a function that activation checkpointing runs again would train its tables "
                "twice"
            )
        return super().backward(grads, weights, needs_grad, tables)
