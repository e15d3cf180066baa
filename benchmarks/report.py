"""Results as tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

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
