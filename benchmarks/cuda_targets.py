"""Figures that others published, and targets of ours, for an H100."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .cuda_workload import DIM, LOOKUPS

Result = dict[str, Any]
PUBLISHED = (
    ("FBGEMM, cached (MANAGED_CACHING)", 3.36, 11.0),
    ("NVIDIA dynamicemb, cached", 11.3, 0.97),
    ("FBGEMM, all rows in device memory", 0.347, 1.005),
)
"""(what, forward ms, backward with Adam ms) of dynamicemb's benchmark at power law 1.05 on an H100."""


def _operator(name: str) -> Callable[[Result], float]:
    return lambda case: float(case["operators"]["times"][name]["median_ms"])


def _ready(case: Result) -> float:
    return float(case["times"][case["ours"]]["plans ready"]["median_ms"])


TARGETS: tuple[tuple[str, float, Callable[[Result], float]], ...] = (
    ("lookup, all hits", 0.40, _operator("lookup")),
    ("update with Adam, all hits", 1.0, _operator("update")),
    ("whole cached step with Adam, plans ready", 4.3, _ready),
    ("the same, later", 2.2, _ready),
)


def is_published_shape(case: Result) -> bool:
    """Whether a case is what the published figures and the targets are about."""
    shape = (case["optimizer"], case["alpha"], case["ratio"], case["dim"], case["lookups"])
    return shape == ("adam", 1.05, 1.0, DIM, LOOKUPS)


def _right(case: Result) -> bool:
    return all(case["operators"]["correct"].values()) and all(all(c.values()) for c in case["correct"].values())


def compare(cases: Sequence[Result], device_name: str | None) -> list[Result]:
    """Every target with what was reached; nothing was on a smaller workload, or with wrong results.

    device_name: of the GPU, None where there is none: times of a host reach nothing.
    """
    there = [case for case in cases if device_name and "absent" not in case]
    valid = [case for case in there if is_published_shape(case) and _right(case)]
    listed = []
    for name, wanted, figure in TARGETS:
        reached = min((figure(case) for case in valid), default=None)
        met = None if reached is None else reached <= wanted
        listed.append({"target": name, "wanted_ms": wanted, "reached_ms": reached, "met": met, "device": device_name})
    return listed
