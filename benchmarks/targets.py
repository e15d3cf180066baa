"""The targets on the CPU and on an H100, and whether a run reached them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .pool import DIM, LOOKUPS

Result = dict[str, Any]

FAST_COPY = 20e9
"""Bytes per second, read and written, that a core copies: from here on torch's targets are the higher ones."""
_TORCH = {
    True: {"sgd": (2.5, 1.7), "adagrad": (6.0, 4.0), "adam": (7.0, 5.0)},
    False: {"sgd": (1.5, 1.2), "adagrad": (4.5, 3.5), "adam": (6.0, 4.5)},
}
"""Whether the core is a fast one -> optimizer -> (median, worst workload)."""
_FBGEMM = {"sgd": 1.5, "adagrad": 3.0, "rowwise_adagrad": 1.5}
_COPY = {"sequence": (1.6, 2.3), "pooled": (1.8, 2.6)}
"""Form -> (median, worst workload), at D = 64."""
_COPY_DIM = 64
_LAYER = (1.05, 1.1)
_CACHE, _CACHE_ALPHA, _CACHE_RATIO = "collection@0.1", 1.05, 2.0
BYTES_PER_ROW = 24
_KEYS = ("ratios", "ratios_of_medians")


@dataclass(frozen=True)
class Target:
    """One line of the table.

    Attributes:
        name: what is asked for.
        at_least: more is better; otherwise less is.
        values: of every workload it applies to.
        median: what their median must reach; None for no such target.
        worst: what each of them must reach.
        of_medians: as `values`, from the medians of rounds instead of the fastest; empty for none.
    """

    name: str
    at_least: bool
    values: Sequence[float]
    median: float | None = None
    worst: float | None = None
    of_medians: Sequence[float] = ()

    def _reaches(self, value: float, wanted: float | None) -> bool:
        return wanted is None or (value >= wanted if self.at_least else value <= wanted)

    def describe(self) -> Result:
        """For the JSON; `met` is None where nothing was measured."""
        reached: dict[str, float | None] = {"median": None, "worst": None}
        met = None
        if self.values:
            median = statistics.median(self.values)
            worst = (min if self.at_least else max)(self.values)
            met = self._reaches(median, self.median) and self._reaches(worst, self.worst)
            reached = {"median": median, "worst": worst}
        return {
            "target": self.name,
            "at_least": self.at_least,
            "wanted": {"median": self.median, "worst": self.worst},
            "reached": reached,
            "workloads": len(self.values),
            "met": met,
            "median_of_medians": statistics.median(self.of_medians) if self.of_medians else None,
        }


def torch_targets(copy_bytes_per_second: float) -> Result:
    """Which of torch's two rows of targets holds for a core that copies so fast."""
    fast = copy_bytes_per_second >= FAST_COPY
    row = f"cores that copy {FAST_COPY / 1e9:g} GB/s or more" if fast else f"cores below {FAST_COPY / 1e9:g} GB/s"
    return {"copy_bytes_per_second": copy_bytes_per_second, "fast": fast, "row": row}


def _ratios(cases: Sequence[Result], key: str, names: Sequence[str]) -> list[float]:
    """For each case, the ratio of the fastest of `names` that took part with the collection's results."""
    found = [[case[key][name] for name in names if name in case[key]] for case in cases]
    return [min(ratios) for ratios in found if ratios]


def _against_rivals(cases: Sequence[Result], fast: bool) -> list[Target]:
    def target(what: str, optimizer: str, names: Sequence[str], median: float, worst: float | None) -> Target:
        alike = [case for case in cases if case["optimizer"] == optimizer]
        values, of_medians = (_ratios(alike, key, names) for key in _KEYS)
        return Target(f"{what}, {optimizer}", True, values, median, worst, of_medians)

    wanted = _TORCH[fast].items()
    targets = [target("torch sparse", optimizer, ["torch"], *both) for optimizer, both in wanted]
    for optimizer, median in _FBGEMM.items():
        targets.append(target("FBGEMM", optimizer, ["fbgemm", "fbgemm-none"], median, None))
    return targets


def _against_ours(cases: Sequence[Result]) -> list[Target]:
    over_ours = [[1 / ratio for ratio in _ratios(cases, key, ["ours"])] for key in _KEYS]
    skewed = [case for case in cases if case["alpha"] == _CACHE_ALPHA]
    cached = [_ratios(skewed, key, [_CACHE]) for key in _KEYS]
    name = f"cache of 10% over all rows resident, power law {_CACHE_ALPHA:g}, no prefetch"
    return [
        Target("collection over table-batched embedding", False, over_ours[0], *_LAYER, over_ours[1]),
        Target(name, False, cached[0], _CACHE_RATIO, None, cached[1]),
    ]


def _against_bounds(cases: Sequence[Result]) -> list[Target]:
    targets = []
    for form, wanted in _COPY.items():
        alike = [c for c in cases if c["dim"] == _COPY_DIM and c["form"] == form and all(c["correct"].values())]
        values = [case["over_copy_bound"] for case in alike]
        targets.append(Target(f"copy bound, D = {_COPY_DIM}, {form}", False, values, *wanted))
    return targets


def _planning(plans: Sequence[Result]) -> list[Target]:
    hits = [plan for plan in plans if plan["what"] == "hits"]

    def rates(kind: str, rows: int, threads: int = 1) -> list[float]:
        alike = [p for p in hits if (p["kind"], p["rows"], p["threads"]) == (kind, rows, threads)]
        return [plan["ids_per_second"] / 1e6 for plan in alike]

    small, large = 1_000_000, 100_000_000
    pairs = zip(rates("hash", small, 2), rates("hash", small), strict=False)
    return [
        Target("plan, hash, 1 million rows, M ids/s", True, rates("hash", small), worst=35),
        Target("plan, hash, 100 million rows, M ids/s", True, rates("hash", large), worst=15),
        Target("plan, index table, M ids/s", True, rates("index", small), worst=45),
        Target("plan, hash, 1 million rows, two threads over one", True, [b / a for b, a in pairs], worst=1.7),
    ]


def _memory(plans: Sequence[Result], growth: Sequence[Result]) -> Target:
    maps = [p["memory"]["id_map_bytes"] / p["rows"] for p in plans if p["kind"] == "hash" and "memory" in p]
    for run in growth:
        beyond = run["memory"]["id_map_bytes"] + run["memory"]["store_bytes"]
        maps.append(beyond / run["rows"] - run["record_bytes"])
    return Target("id map and store, bytes per row beyond the record", False, maps, worst=BYTES_PER_ROW)


def compare(
    steps: Sequence[Result], plans: Sequence[Result], growth: Sequence[Result], copy_bytes_per_second: float
) -> list[Result]:
    """Every target with what was reached, at one thread; only results that agreed are counted."""
    cases = [case for case in steps if case["threads"] == 1]
    targets = [*_against_bounds(cases), *_against_ours(cases)]
    targets += _against_rivals(cases, torch_targets(copy_bytes_per_second)["fast"])
    targets += [*_planning(plans), _memory(plans, growth)]
    return [target.describe() for target in targets]


# ---- on a GPU

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


GPU_TARGETS: tuple[tuple[str, float, Callable[[Result], float]], ...] = (
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


def compare_on_gpu(cases: Sequence[Result], device_name: str | None) -> list[Result]:
    """Every target with what was reached; nothing was on a smaller workload, or with wrong results.

    device_name: of the GPU, None where there is none: times of a host reach nothing.
    """
    there = [case for case in cases if device_name and "absent" not in case]
    valid = [case for case in there if is_published_shape(case) and _right(case)]
    listed = []
    for name, wanted, figure in GPU_TARGETS:
        reached = min((figure(case) for case in valid), default=None)
        met = None if reached is None else reached <= wanted
        listed.append({"target": name, "wanted_ms": wanted, "reached_ms": reached, "met": met, "device": device_name})
    return listed
