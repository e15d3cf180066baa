"""Raises an interrupt at any point where Python checks for signals, and models the states that may result."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch


class Interrupt(KeyboardInterrupt):
    """The exception that the tests' signal handlers raise."""


# ---- raising interrupts


@contextmanager
def handler(number: int) -> Any:
    """Installs a handler that raises `Interrupt` on the signal within the block."""

    def raise_interrupt(*_: object) -> None:
        raise Interrupt

    before = signal.signal(number, raise_interrupt)
    try:
        yield
    finally:
        signal.signal(number, before)


def strike(action: Callable[[], object], at: int) -> str | None:
    """Runs `action` and sends SIGINT at the `at`-th point (from 1) where Python checks for signals in the main thread.

    These points are the entry of a Python function and the return of a C function; an exception of the handler replaces
    the C function's result. The signal is sent to the whole process, so code under test may defer it with a handler of
    its own, but cannot avoid it by masking it in the main thread: another thread would receive it.

    Returns:
        The point at which the signal struck; None if the action ended before that point.

    Raises:
        AssertionError: the current stream has changed afterwards.
    """
    stream = torch.accelerator.current_stream() if torch.accelerator.is_available() else None
    points = 0
    struck = None

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal points, struck
        if event not in ("call", "c_return") or struck:
            return
        points += 1
        if points == at:
            what = getattr(arg, "__name__", "") if event == "c_return" else "entry"
            code = frame.f_code
            struck = f"point {at}: {code.co_filename}:{frame.f_lineno}, {code.co_qualname}, {what}"
            os.kill(os.getpid(), signal.SIGINT)

    # Exceptions in code that the garbage collector calls are swallowed, and pytest keeps them with their frames.
    gc.disable()
    with handler(signal.SIGINT):
        sys.setprofile(profile)
        try:
            action()
        except Interrupt:
            pass
        # raised if the signal strikes threading.Condition between the release of its lock and the wait
        except RuntimeError as error:
            if "release unlocked lock" not in str(error) or "threading.py" not in str(struck):
                raise
        finally:
            sys.setprofile(None)
            gc.enable()
    assert stream is None or torch.accelerator.current_stream() == stream, f"{struck}: the stream has changed"
    return struck


# ---- the reference model


@dataclass(frozen=True)
class TrainingState:
    """The state of a training run with Adagrad and lr_decay, in NumPy float32; each update depends on the step count t.

    Attributes:
        weights: weights of each table, `[rows, D]` in the table's dtype, over all ids that ever occur.
        sums: Adagrad's state of each table, float32 `[rows, D]`.
        pending: pending gradients in the accumulation buffer, float32 `[rows, D]`.
        known: whether a row exists in its table (always for an index table), bool `[rows]`.
        backwards: backward passes since the last update.
        t: number of updates; None in an observed state, since only the next update would reveal it.
    """

    weights: tuple[np.ndarray, ...]
    known: tuple[np.ndarray, ...]
    sums: tuple[np.ndarray, ...] = ()
    pending: tuple[np.ndarray, ...] = ()
    backwards: int = 0
    t: int | None = 0

    EPS = 1e-2
    OPTIONS = {"lr_decay": 1.0, "eps": EPS}  # noqa: RUF012 (no field: it has no annotation)

    @classmethod
    def start(cls, weights: Sequence[np.ndarray], hashed: Sequence[bool]) -> TrainingState:
        zeros = tuple(np.zeros(w.shape, np.float32) for w in weights)
        known = tuple(np.full(len(w), not h) for w, h in zip(weights, hashed, strict=True))
        return cls(tuple(weights), known, zeros, zeros)

    def forward(self, lookups: Sequence[np.ndarray]) -> TrainingState:
        """Returns the state after a training forward of `lookups` (rows of each table), which inserts the rows."""
        known = tuple(k.copy() for k in self.known)
        for table, rows in zip(known, lookups, strict=True):
            table[rows] = True
        return replace(self, known=known)

    def backward(self, lookups: Sequence[np.ndarray], lr: float, window: int) -> TrainingState:
        """Returns the state after the backward pass of the sum of all outputs: each lookup's gradient is 1."""
        counts = [np.bincount(rows, minlength=len(w)) for rows, w in zip(lookups, self.weights, strict=True)]
        grads = [
            p + np.broadcast_to(count[:, None], p.shape).astype(np.float32)
            for p, count in zip(self.pending, counts, strict=True)
        ]
        if self.backwards + 1 < window:
            return replace(self, pending=tuple(grads), backwards=self.backwards + 1)
        assert self.t is not None
        t = self.t + 1
        clr, eps = np.float32(lr / (1 + (t - 1) * 1.0)), np.float32(self.EPS)
        sums = tuple(s + g * g for s, g in zip(self.sums, grads, strict=True))
        weights = tuple(
            (w.astype(np.float32) - clr * (g / (np.sqrt(s) + eps))).astype(w.dtype)
            for w, g, s in zip(self.weights, grads, sums, strict=True)
        )
        zeros = tuple(np.zeros_like(p) for p in self.pending)
        return replace(self, weights=weights, sums=sums, pending=zeros, backwards=0, t=t)

    def difference(self, other: TrainingState) -> str:
        """Describes differences in weights, known rows and, if `other` has them, sums and t; "" if there are none."""
        found = []
        for table, (a, b) in enumerate(zip(self.weights, other.weights, strict=True)):
            rows = np.flatnonzero((a != b).any(axis=1) | np.isnan(b).any(axis=1))
            if len(rows):
                row = rows[0]
                found.append(f"table {table}: {len(rows)} rows, such as {row}: {b[row][:3]}, not {a[row][:3]}")
        for table, (a, b) in enumerate(zip(self.sums, other.sums, strict=False)):  # an observed state has no sums
            rows = np.flatnonzero((a != b).any(axis=1))
            if len(rows):
                found.append(f"table {table}: the sum of row {rows[0]} is {b[rows[0]][:3]}, not {a[rows[0]][:3]}")
        for table, (a, b) in enumerate(zip(self.known, other.known, strict=True)):
            if (a != b).any():
                found.append(f"table {table}: known {np.flatnonzero(b).tolist()}, not {np.flatnonzero(a).tolist()}")
        if other.t is not None and self.t != other.t:
            found.append(f"t is {other.t}, not {self.t}")
        return ", ".join(found)

    def key(self) -> tuple[object, ...]:
        """Returns a value that is equal for equal states."""
        arrays = (*self.weights, *self.known, *self.sums, *self.pending)
        return (self.backwards, self.t, *(array.tobytes() for array in arrays))


Change = Callable[[TrainingState], TrainingState]


@dataclass
class PossibleStates:
    """The states in which a training run may be: several after an interrupt, until the state is observed."""

    moments: list[TrainingState]
    log: list[str] = field(default_factory=list)

    def applied(self, what: str, *changes: Change) -> None:
        """Applies all changes to every possible state."""
        self.log.append(what)
        for change in changes:
            self.moments = [change(moment) for moment in self.moments]

    def may_have_applied(self, what: str, *changes: Change) -> None:
        """Adds the states in which only the first n changes were applied, for every n from none to all."""
        self.log.append(f"interrupted {what}")
        every = [list(itertools.accumulate(changes, lambda m, change: change(m), initial=m)) for m in self.moments]
        self.moments = list({moment.key(): moment for moment in itertools.chain.from_iterable(every)}.values())

    def observe(self, seen: TrainingState) -> None:
        """Keeps the states that match `seen`; fails if none does."""
        differences = [moment.difference(seen) for moment in self.moments]
        if all(differences):
            from_each = "; ".join(f"({n}) {text}" for n, text in enumerate(dict.fromkeys(differences), 1))
            raise AssertionError(f"after {self.log[-8:]} it is none of what it could be: {from_each}")
        self.moments = [moment for moment, differs in zip(self.moments, differences, strict=True) if not differs]
