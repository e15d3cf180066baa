"""Results as tables on the terminal: of the CPU benchmark, then of that on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .ceilings import faster_swaps, rate
from .phases import PHASES
from .targets import PUBLISHED, is_published_shape

Result = dict[str, Any]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns: the first left-aligned, the others right-aligned."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    shown = []
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        cells[0] = line[0].ljust(widths[0])
        shown.append("  ".join(cells).rstrip())
    shown.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(shown)


def machine_lines(machine: Result) -> str:
    """The machine of the figures; says so when it was busy."""
    load = machine["load_average"][0]
    busy = "\nOther processes were running: take these figures as rough." if load > machine["cores"] / 2 else ""
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, isa {machine['isa']}, "
        f"load {load}\n{', '.join(machine['caches'])}{busy}"
    )


def case_name(case: Result) -> str:
    """One line for a workload."""
    return (
        f"{case['tables']} D={case['dim']} {case['form']} {case['optimizer']} {case['distribution']} x{case['threads']}"
    )


def _rival(case: Result, name: str) -> str:
    if name not in case["times"]:
        return "-"
    best = f"{case['times'][name]['min_ms']:.1f}"
    return f"{best} ({case['ratios'][name]:.2f}x)" if name in case["ratios"] else f"{best} DIFFERS"


def _steps(cases: Sequence[Result]) -> str:
    names = list(dict.fromkeys(name for case in cases for name in case["times"] if name != "collection"))
    header = ["step, fastest in ms (ratio to collection)", "collection", *names, "copy bound", "random bound"]
    rows = []
    for case in cases:
        bounds = [
            f"{case['copy_bound_ms']:.2f} ({case['over_copy_bound']:.1f}x)",
            f"{case['random_bound_ms']:.2f} ({case['over_random_bound']:.1f}x)",
        ]
        collection = f"{case['times']['collection']['min_ms']:.2f}"
        rows.append([case_name(case), collection, *(_rival(case, name) for name in names), *bounds])
    return table(header, rows)


def _phases(cases: Sequence[Result]) -> str:
    """The cost of the layer above the table-batched embedding, by phase."""
    shown = [(name, phase) for phase in ("forward", "backward") for name in ("collection", "ours")]
    header = ["fastest in ms", *(f"{name} {phase}" for name, phase in shown), "step over ours", "unique rows", "hits"]
    rows = []
    for case in cases:
        times = [
            f"{case['phases'][name][phase]['min_ms']:.2f}" if name in case["phases"] else "-" for name, phase in shown
        ]
        over = f"{1 / case['ratios']['ours']:.2f}x" if "ours" in case["ratios"] else "-"
        rows.append([case_name(case), *times, over, f"{case['unique_rows']:,.0f}", f"{case['hit_rate']:.1%}"])
    return table(header, rows)


def _skipped(cases: Sequence[Result]) -> str:
    reasons: dict[str, int] = {}
    for case in cases:
        for name, reason in case["skipped"].items():
            line = f"{name}: {reason}"
            reasons[line] = reasons.get(line, 0) + 1
    return "\n".join(f"left out in {count} of {len(cases)} cases, {line}" for line, count in reasons.items())


def _plans(plans: Sequence[Result]) -> str:
    header = ["plan", "M ids/s", "torch.unique", "slowest batch ms", "new", "out"]
    rows = [
        [
            plan["case"],
            f"{plan['ids_per_second'] / 1e6:.1f}",
            f"{plan['torch_unique_ids_per_second'] / 1e6:.1f}",
            f"{plan['slowest_batch_ms']:.1f}",
            f"{plan['counters']['new_rows']:,}",
            f"{plan['counters']['rows_out']:,}",
        ]
        for plan in plans
    ]
    lines = [table(header, rows)]
    for plan in plans:
        if "memory" in plan:
            memory, count = plan["memory"], plan["rows"]
            in_map, grown = memory["id_map_bytes"] / count, memory["process_growth_bytes"] / count
            lines.append(
                f"{plan['kind']}, {count:,} rows: id map {in_map:.1f} bytes per row; the process grew by "
                f"{grown:.1f} per row (all rows resident, buffers of a batch included)"
            )
    return "\n".join(lines)


def _growth(runs: Sequence[Result]) -> str:
    header = ["growing table", "step ms", "build s", "map B/row", "store B/row", "process B/row", "misses"]
    rows = []
    for run in runs:
        memory, count = run["memory"], run["rows"]
        counters = run["counters"]
        rows.append(
            [
                f"{count:,} rows D={run['dim']}, record {run['record_bytes']} B",
                f"{run['time']['median_ms']:.1f}",
                f"{run['build_seconds']:.1f}",
                f"{memory['id_map_bytes'] / count:.1f}",
                f"{memory['store_bytes'] / count:.1f}",
                f"{memory['process_growth_bytes'] / count:.1f}",
                f"{counters['unique_misses'] / counters['unique_rows']:.1%}",
            ]
        )
    return table(header, rows)


def _policies(results: Sequence[Result]) -> str:
    header = ["cache policy, exact counts", "policy", "unique misses", "rows in", "rows out"]
    rows = [
        [
            f"{result['stream']}, {result['slots']:,} of {result['rows']:,} rows",
            result["policy"],
            f"{result['unique_miss_rate']:.2%}",
            f"{result['counters']['rows_in']:,}",
            f"{result['counters']['rows_out']:,}",
        ]
        for result in results
    ]
    return table(header, rows)


def targets_table(targets: Sequence[Result], title: str = "target, one thread") -> str:
    """The results of `Target.describe`: wanted, reached, and whether it was met."""

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    verdict = {None: "not measured", True: "met", False: "NOT MET"}
    rows = []
    for target in targets:
        sign = ">=" if target["at_least"] else "<="
        pairs = [(target["wanted"][key], target["reached"][key]) for key in ("median", "worst")]
        cells = [
            cell for wanted, reached in pairs for cell in (f"{sign} {wanted:g}" if wanted else "", number(reached))
        ]
        counted = [str(target["workloads"]), number(target["median_of_medians"])]
        rows.append([target["target"], *cells, verdict[target["met"]], *counted])
    header = [title, "median", "", "worst", "", "", "workloads", "median, from medians of rounds"]
    return table(header, rows)


def _row_of_targets(chosen: Result) -> str:
    bandwidth = chosen["copy_bytes_per_second"]
    if not bandwidth:
        return "copy bandwidth of one thread: not measured"
    return (
        f"copy bandwidth of one thread: {bandwidth / 1e9:.1f} GB/s, bytes read and written; so torch's targets are "
        f"those of {chosen['row']}"
    )


def _bandwidth(bounds: Sequence[Result]) -> str:
    lines = []
    for bound in bounds:
        costs = ", ".join(
            f"{c['row_bytes']} B of {c['rows'] * c['row_bytes'] / 2**20:.0f} MiB {c['nanoseconds']:.0f} ns"
            for c in bound["random_rows"]
        )
        lines.append(
            f"{bound['threads']} thread(s): copy {bound['copy_bytes_per_second'] / 1e9:.1f} GB/s; row: {costs}"
        )
    return "\n".join(lines)


def render(results: Result) -> str:
    """Everything a run found."""
    parts = [machine_lines(results["machine"])]
    if results["steps"]:
        parts += [_bandwidth(results["bounds"]), _steps(results["steps"]), _phases(results["steps"])]
        parts.append(_skipped(results["steps"]))
    for key, show in (("plans", _plans), ("growth", _growth), ("policies", _policies)):
        if results[key]:
            parts.append(show(results[key]))
    parts += [_row_of_targets(results["torch_targets"]), targets_table(results["targets"])]
    parts.append(f"took {results['seconds']:.0f} s, load average at the end {results['load_average_at_end'][0]}")
    return "\n\n".join(part for part in parts if part)


# ---- on a GPU


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
            f"{ceiling['bytes_per_second'] / 1e9:.1f}",
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


def _case_steps(case: Result) -> str:
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
    parts = [title, _counts(case, ceilings), _case_steps(case)]
    if case["operators"]:
        parts.append(_operators(case, ceilings))
    parts += [f"left out: {name}: {reason}" for name, reason in case["skipped"].items()]
    return "\n".join(parts)


def render_gpu_targets(targets: Sequence[Result]) -> str:
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
