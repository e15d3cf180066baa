"""The targets of the CPU path, and whether a run reached them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
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
        of_medians: as `values`, from the medians of rounds instead of the fastest; empty for none.
    """

    name: str
    wanted: float
    at_least: bool
    values: Sequence[float]
    whole: bool
    threads: int
    of_medians: Sequence[float] = ()

    def _worst(self, values: Sequence[float]) -> float | None:
        return (min if self.at_least else max)(values, default=None)

    def _reached(self, values: Sequence[float]) -> float | None:
        return self._worst(values) if self.whole or not values else statistics.median(values)

    def describe(self) -> Result:
        """For the JSON; `met` is None where nothing was measured."""
        reached = self._reached(self.values)
        met = None if reached is None else (reached >= self.wanted if self.at_least else reached <= self.wanted)
        return {
            "target": self.name,
            "threads": self.threads,
            "wanted": self.wanted,
            "at_least": self.at_least,
            "reached": reached,
            "median": statistics.median(self.values) if self.values else None,
            "worst": self._worst(self.values),
            "workloads": len(self.values),
            "met": met,
            "of_medians": self._reached(self.of_medians),
        }


def _faster(ratios: Mapping[str, float], names: Sequence[str], ours: str) -> list[float]:
    """The ratio of the fastest of `names` that took part with equal results to `ours`."""
    ratios = {"ours": 1.0, **ratios}
    rivals = [ratios[name] for name in names if name in ratios]
    return [min(rivals) / ratios[ours]] if rivals and ours in ratios else []


def _against_rivals(cases: Sequence[Result], threads: int, ours: str, suffix: str = "") -> list[Target]:
    def ratios(key: str, optimizer: str, names: Sequence[str]) -> list[float]:
        return [r for case in cases if case["optimizer"] == optimizer for r in _faster(case[key], names, ours)]

    def target(optimizer: str, what: str, wanted: float, names: Sequence[str], whole: bool) -> Target:
        values, of_medians = (ratios(key, optimizer, names) for key in ("ratios", "ratios_of_medians"))
        return Target(what, wanted, True, values, whole, threads, of_medians)

    column = 0 if threads == 1 else 1
    targets = []
    for optimizer, wanted in _TORCH.items():
        (median, every), name = wanted[column], f"torch sparse, {optimizer}{suffix}"
        targets.append(target(optimizer, f"{name}, median", median, ["torch"], False))
        targets.append(target(optimizer, f"{name}, every workload", every, ["torch"], True))
    for optimizer, medians in _FBGEMM.items():
        name = f"FBGEMM, {optimizer}{suffix}, median"
        targets.append(target(optimizer, name, medians[column], ["fbgemm", "fbgemm-none"], False))
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
        targets += _against_rivals(cases, count, "ours")
        # The rivals' tables need no id map either.
        targets += _against_rivals(cases, count, "ours-index", ", index tables")
        resident = [1 / case["ratios"]["ours-index"] for case in cases if "ours-index" in case["ratios"]]
        targets.append(
            Target("100% hits against an all-resident index table", ALL_RESIDENT, False, resident, False, count)
        )
    targets += _against_bounds([case for case in steps if case["threads"] == 1])
    targets += _planning(plans) + _memory(plans, growth)
    return [target.describe() for target in targets]
