"""The targets of the CPU path, and whether a run reached them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Result = dict[str, Any]

_TORCH = {"sgd": ((2.5, 1.7), (2.8, 1.8)), "adagrad": ((6, 4), (6.5, 4.5)), "adam": ((7, 5), (8, 5.5))}
"""Optimizer -> (median, every workload) at one thread, and at two."""
_FBGEMM = {"sgd": (2.2, 3.0), "adagrad": (3.5, 5.0), "rowwise_adagrad": (1.6, 2.3)}
"""Optimizer -> median at one thread, and at two."""
_COPY = {128: 3.0, 64: 3.5, 32: 4.5}
ALL_RESIDENT = 1.3
BYTES_PER_ROW = 24


@dataclass(frozen=True)
class Target:
    """One line of the table.

    Attributes:
        name: what is asked for.
        wanted: the number.
        at_least: more is better; otherwise less is.
        values: of every workload it applies to.
        whole: the worst workload must reach it; otherwise the median.
        threads: torch's.
    """

    name: str
    wanted: float
    at_least: bool
    values: Sequence[float]
    whole: bool
    threads: int

    def describe(self) -> Result:
        """For the JSON; `met` is None where nothing was measured."""
        worst = (min if self.at_least else max)(self.values, default=None)
        median = statistics.median(self.values) if self.values else None
        reached = worst if self.whole else median
        met = None if reached is None else (reached >= self.wanted if self.at_least else reached <= self.wanted)
        return {
            "target": self.name,
            "threads": self.threads,
            "wanted": self.wanted,
            "at_least": self.at_least,
            "reached": reached,
            "median": median,
            "worst": worst,
            "workloads": len(self.values),
            "met": met,
        }


def _faster(case: Result, names: Sequence[str]) -> list[float]:
    """The ratio to the fastest of `names` that took part with equal results."""
    ratios = [case["ratios"][name] for name in names if name in case["ratios"]]
    return [min(ratios)] if ratios else []


def _ratios(cases: Sequence[Result], optimizer: str, names: Sequence[str]) -> list[float]:
    return [r for case in cases if case["optimizer"] == optimizer for r in _faster(case, names)]


def _against_rivals(cases: Sequence[Result], threads: int) -> list[Target]:
    column = 0 if threads == 1 else 1
    targets = []
    for optimizer, wanted in _TORCH.items():
        values, (median, every) = _ratios(cases, optimizer, ["torch"]), wanted[column]
        targets.append(Target(f"torch sparse, {optimizer}, median", median, True, values, False, threads))
        targets.append(Target(f"torch sparse, {optimizer}, every workload", every, True, values, True, threads))
    for optimizer, medians in _FBGEMM.items():
        values = _ratios(cases, optimizer, ["fbgemm", "fbgemm-none"])
        targets.append(Target(f"FBGEMM, {optimizer}, median", medians[column], True, values, False, threads))
    return targets


def _against_bounds(cases: Sequence[Result]) -> list[Target]:
    uniform = [c["over_random_bound"] for c in cases if c["alpha"] == 0 and _valid(c)]
    skewed = [c["over_random_bound"] for c in cases if c["alpha"] >= 1.05 and _valid(c)]
    targets = [
        Target("random-access bound, uniform", 1.3, False, uniform, False, 1),
        Target("random-access bound, alpha 1.05 and more", 2, False, skewed, False, 1),
    ]
    for dim, wanted in _COPY.items():
        for form in ("sequence", "pooled"):
            alike = [c for c in cases if c["dim"] == dim and c["form"] == form]
            values = [c["over_copy_bound"] for c in alike if _valid(c)]
            targets.append(Target(f"copy bound, D = {dim}, {form}", wanted, False, values, False, 1))
    return targets


def _valid(case: Result) -> bool:
    return all(case["correct"].values())


def _planning(plans: Sequence[Result]) -> list[Target]:
    def rates(kind: str, rows: int, skews: Sequence[bool]) -> list[float]:
        hits = [p for p in plans if p["what"] == "hits" and p["kind"] == kind and p["rows"] == rows]
        return [p["ids_per_second"] / 1e6 for p in hits if (p["alpha"] > 0) in skews]

    small, large, both = 1_000_000, 100_000_000, (False, True)
    return [
        Target("plan, hash, 1 million rows uniform, M ids/s", 35, True, rates("hash", small, [False]), True, 1),
        Target("plan, hash, 1 million rows skewed, M ids/s", 60, True, rates("hash", small, [True]), True, 1),
        Target("plan, hash, 100 million rows, M ids/s", 30, True, rates("hash", large, both), True, 1),
        Target("plan, index table, M ids/s", 70, True, rates("index", small, both), True, 1),
    ]


def _memory(plans: Sequence[Result], growth: Sequence[Result]) -> list[Target]:
    maps = [p["memory"]["id_map_bytes"] / p["rows"] for p in plans if p["kind"] == "hash" and "memory" in p]
    for run in growth:
        beyond = run["memory"]["id_map_bytes"] + run["memory"]["store_bytes"]
        maps.append(beyond / run["rows"] - run["record_bytes"])
    return [Target("id map and store, bytes per row beyond the record", BYTES_PER_ROW, False, maps, True, 1)]


def compare(
    steps: Sequence[Result], plans: Sequence[Result], growth: Sequence[Result], threads: Sequence[int]
) -> list[Result]:
    """Every target with what was reached; only cases whose results agreed are counted."""
    targets: list[Target] = []
    for count in threads:
        cases = [case for case in steps if case["threads"] == count]
        targets += _against_rivals(cases, count)
        resident = [1 / case["ratios"]["ours-index"] for case in cases if "ours-index" in case["ratios"]]
        targets.append(
            Target("100% hits against an all-resident index table", ALL_RESIDENT, False, resident, False, count)
        )
    targets += _against_bounds([case for case in steps if case["threads"] == 1])
    targets += _planning(plans) + _memory(plans, growth)
    return [target.describe() for target in targets]
