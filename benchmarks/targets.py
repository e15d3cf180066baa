"""The performance targets on the CPU and on an H100."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from .runner import Row, Target

FAST_COPY = 20e9
"""The copy bandwidth of a core, in bytes read and written per second, from which the higher targets for torch apply."""
_TORCH = {
    True: {"sgd": (2.5, 1.7), "adagrad": (6.0, 4.0), "adam": (7.0, 5.0)},
    False: {"sgd": (1.5, 1.2), "adagrad": (4.5, 3.5), "adam": (6.0, 4.5)},
}
"""The targets by speed of the core (whether it is a fast one) and optimizer: (median, worst workload)."""
_FBGEMM = {"sgd": 1.5, "adagrad": 3.0, "rowwise_adagrad": 1.5}
_COPY = {"sequence": (1.6, 2.3), "pooled": (1.8, 2.6)}
"""The targets by form of the output: (median, worst workload), at D = 64."""
BYTES_PER_ROW = 24
STEP, CACHED = "step, fastest in ms (ratio to collection)", "collection@0.1"
BEST, MEDIANS = "ratios", "ratios_of_medians"


def _ratio(names: Sequence[str], key: str, row: Row) -> float | None:
    """Returns the best ratio among the contenders in `names` that ran and agree with the collection."""
    return min((row[key][name] for name in names if name in row[key]), default=None)


def _layer(key: str, row: Row) -> float | None:
    ratio = _ratio(["ours"], key, row)
    return 1 / ratio if ratio else None


def _bound(row: Row) -> float | None:
    return float(row["over_copy_bound"]) if all(row["correct"].values()) else None


def _step_targets(fast: bool) -> list[Target]:
    """Returns the targets for steps that run on one thread."""
    cores = f"cores that copy {FAST_COPY / 1e9:g} GB/s or more" if fast else f"cores below {FAST_COPY / 1e9:g} GB/s"
    one = {"table": STEP, "threads": 1}
    targets = [
        Target(f"copy bound, D = 64, {form}", _bound, {**one, "dim": 64, "form": form}, *both)
        for form, both in _COPY.items()
    ]
    name = "collection over table-batched embedding"
    targets.append(Target(name, partial(_layer, BEST), one, 1.05, 1.1, of_medians=partial(_layer, MEDIANS)))
    skewed = {**one, "distribution": "power law 1.05"}
    name, columns = "cache of 10% over all rows resident, power law 1.05, no prefetch", (BEST, MEDIANS)
    best, medians = (partial(_ratio, [CACHED], key) for key in columns)
    targets.append(Target(name, best, skewed, 2.0, of_medians=medians))
    wanted: list[tuple[str, list[str], str, float, float | None]] = [
        *((f"torch sparse, {cores}", ["torch"], optimizer, *both) for optimizer, both in _TORCH[fast].items()),
        *(("FBGEMM", ["fbgemm", "fbgemm-none"], optimizer, median, None) for optimizer, median in _FBGEMM.items()),
    ]
    for what, names, optimizer, median, worst in wanted:
        best, medians = (partial(_ratio, names, key) for key in columns)
        where = {**one, "optimizer": optimizer}
        targets.append(Target(f"{what}, {optimizer}", best, where, median, worst, True, medians))
    return targets


def cpu_targets(rows: Sequence[Row]) -> list[Target]:
    """Returns all targets for the CPU; the ones relative to torch depend on the copy bandwidth of one thread."""
    copies = [row for row in rows if row.get("table") == "copy" and row["threads"] == 1]
    fast = any(row["copy_bytes_per_second"] >= FAST_COPY for row in copies)
    plans = [
        ("hash, 1 million rows", "M ids/s", {"kind": "hash", "rows": 1_000_000}, 35.0),
        ("hash, 100 million rows", "M ids/s", {"kind": "hash", "rows": 100_000_000}, 15.0),
        ("index table", "M ids/s", {"kind": "index", "rows": 1_000_000}, 45.0),
        ("hash, 1 million rows", "two threads over one", {"kind": "hash", "rows": 1_000_000}, 1.7),
    ]
    return [
        *_step_targets(fast),
        *(
            Target(
                f"plan, {what}, {column}",
                column,
                {"what": "hits", "threads": 1 if column == "M ids/s" else 2, **where},
                worst=worst,
                at_least=True,
            )
            for what, column, where, worst in plans
        ),
        Target("id map and store, bytes per row beyond the record", "map_bytes_per_row", worst=BYTES_PER_ROW),
    ]


# ---- on a GPU

PUBLISHED = (
    ("FBGEMM, cached (MANAGED_CACHING)", 3.36, 11.0),
    ("NVIDIA dynamicemb, cached", 11.3, 0.97),
    ("FBGEMM, all rows in device memory", 0.347, 1.005),
)
"""(what, forward ms, backward with Adam ms) of dynamicemb's benchmark at power law 1.05 on an H100."""
GPU_TARGETS = [
    Target(f"{name}, median ms on an H100", column, {"published shape": True}, worst=worst)
    for name, column, worst in (
        ("lookup, all hits", "lookup", 0.40),
        ("update with Adam, all hits", "update", 1.0),
        ("whole cached step with Adam, plans ready", "plans ready", 4.3),
        ("the same, later", "plans ready", 2.2),
    )
]
