"""Results of the CUDA benchmark as tables on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .cuda_ceilings import faster_swaps, rate
from .cuda_ours import PHASES
from .cuda_targets import PUBLISHED, is_published_shape
from .report import table

Result = dict[str, Any]
_GB = 1e9


def _milliseconds(summary: Result | None) -> str:
    return f"{summary['median_ms']:.3f} ({summary['min_ms']:.3f})" if summary else "-"


def render_machine(machine: Result) -> str:
    """Device, driver, torch, host."""
    device = machine["device"]
    host = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB"
    if device["type"] == "cpu":
        what = "device: the host itself. Nothing here says anything about a GPU"
    else:
        what = (
            f"device: {device['name']}, {device['memory_bytes'] / 2**30:.0f} GiB, compute capability "
            f"{device['capability']}, driver {device['driver']}, CUDA {device['cuda']}"
        )
    return f"{what}\ntorch {machine['packages']['torch']}, {machine['torch_threads']} threads\nhost: {host}"


def render_pools(pools: Sequence[Result]) -> str:
    """How many rows there are, and what they need."""
    lines = []
    for pool in pools:
        lines.append(
            f"{pool['distribution']}: {pool['batches']} batches of {pool['lookups']:,} lookups in {pool['tables']} "
            f"tables of {pool['id_range']:,} ids; footprint {sum(pool['footprints']):,} rows (distinct ids of all "
            f"batches), {pool['rows']:,} of a table; {pool['unique_rows']:,.0f} distinct rows a batch; needs up to "
            f"{pool['device_bytes'] / 2**30:.1f} GiB of device and {pool['host_bytes'] / 2**30:.1f} GiB of host memory"
        )
    return "\n".join(lines)


def render_ceilings(ceilings: Sequence[Result]) -> str:
    """The machine's ceilings, and which way of swapping is faster."""
    verdict = {None: "", True: "right", False: "DIFFERS"}
    rows = [
        [
            ceiling["name"],
            f"{ceiling['bytes_per_second'] / _GB:.1f}",
            f"{ceiling['seconds'] * 1e3:.3f}",
            verdict[ceiling["correct"]],
        ]
        for ceiling in ceilings
        if not ceiling["absent"]
    ]
    absent = [f"not measured: {c['name']}: {c['absent']}" for c in ceilings if c["absent"]]
    return "\n".join([table(["ceilings, best", "GB/s", "ms", ""], rows), *faster_swaps(list(ceilings)), *absent])


def case_title(case: Result) -> str:
    """One line for a case."""
    return f"{case['distribution']}, {case['optimizer']}, cache of {case['ratio']:g} of the footprint"


def _flags(correct: dict[str, bool]) -> str:
    if not correct:
        return ""
    return ", ".join(f"{name} {'right' if good else 'DIFFERS'}" for name, good in correct.items())


def _steps(case: Result) -> str:
    names = [*PHASES, "other", "plans ready", "end to end"]
    header = ["ms a step: median (min)", *names, "in a row", "beside ours"]
    rows = []
    for contender, times in case["times"].items():
        mean = times["in a row"]["median_ms"]
        cells = [_milliseconds(times.get(name)) for name in names]
        rows.append([contender, *cells, f"{mean:.3f}", _flags(case["correct"].get(contender, {}))])
    return table(header, rows)


def _operators(case: Result, ceilings: Sequence[Result]) -> str:
    """Ours alone with plans ready, at the copy bound beside the rivals of the same run and what was published."""
    found = case["operators"]
    speed = rate(list(ceilings), "device copy")
    header = ["operators and rivals in a row, ms: median (min)", "lookup", "update", "together", ""]
    times = found["times"]
    ours = [_milliseconds(times[name]) for name in ("lookup", "update", "together")]
    rows = [["ours, operators, plans ready", *ours, _flags(found["correct"])]]
    if speed:
        bounds = {name: size / speed * 1e3 for name, size in case["bytes"].items()}
        shown = [f"{bounds[name]:.3f}" for name in ("lookup", "update")]
        rows.append(["their bytes at the speed of a copy", *shown, f"{sum(bounds.values()):.3f}", "bound"])
    for contender, figures in case["times"].items():
        if contender in case["correct"] and not contender.startswith("collection"):
            cells = [_milliseconds(figures[f"{name} in a row"]) for name in ("lookup", "update", "together")]
            rows.append([contender, *cells, _flags(case["correct"][contender])])
    if is_published_shape(case):
        rows += [
            [f"published: {name}", f"{forward:g}", f"{backward:g}", f"{forward + backward:g}", "H100, not measured"]
            for name, forward, backward in PUBLISHED
        ]
    return table(header, rows)


def _counts(case: Result, ceilings: Sequence[Result]) -> str:
    lines = []
    for name, counted in case["counters"].items():
        batches = counted["batches"]
        mean = {key: value / batches for key, value in counted.items()}
        lines.append(
            f"{name}: {case['slots']:,} slots; a step: {mean['lookups']:,.0f} lookups, {mean['unique_rows']:,.0f} "
            f"distinct rows, {1 - mean['unique_misses'] / mean['unique_rows']:.2%} of them hits; "
            f"{mean['rows_in']:,.0f} rows in ({mean['bytes_in'] / 1e6:.1f} MB), {mean['rows_out']:,.0f} out "
            f"({mean['bytes_out'] / 1e6:.1f} MB)"
        )
        duplex = rate(list(ceilings), "duplex")
        moved = mean["bytes_in"] + mean["bytes_out"]
        if duplex and moved:
            lines.append(f"{name}: these bytes at the speed of the duplex copy: {moved / duplex * 1e3:.3f} ms")
    return "\n".join(lines)


def render_case(case: Result, ceilings: Sequence[Result]) -> str:
    """Everything of one case."""
    title = f"== {case_title(case)}"
    if "absent" in case:
        return f"{title}\nleft out: {case['absent']}"
    parts = [title, _counts(case, ceilings), _steps(case)]
    if case["operators"]:
        parts.append(_operators(case, ceilings))
    parts += [f"left out: {name}: {reason}" for name, reason in case["skipped"].items()]
    return "\n".join(parts)


def render_targets(targets: Sequence[Result]) -> str:
    """The targets for an H100, and whether they were reached."""
    verdict = {None: "not measured", True: "met", False: "MISSED"}
    rows = [
        [
            target["target"],
            f"<= {target['wanted_ms']:g}",
            "-" if target["reached_ms"] is None else f"{target['reached_ms']:.3f}",
            verdict[target["met"]],
        ]
        for target in targets
    ]
    device = targets[0]["device"]
    name = "targets of an H100, median ms" + (f"; this is {device}" if device and "H100" not in device else "")
    return table([name, "wanted", "reached", ""], rows)
