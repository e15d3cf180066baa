"""Steps as pictures: ratios and bounds on the CPU, phases on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from .phases import PHASES
from .runner import Results, Row
from .targets import STEP


def case_name(case: Row) -> str:
    """One line for a workload."""
    shown = " ".join(str(case[name]) for name in ("tables", "form", "optimizer", "distribution"))
    return f"{shown} D={case['dim']} x{case['threads']}"


Panel = tuple[str, Callable[[Any], None]]


def _picture(results: Results, path: Path, labels: Sequence[str], panels: Sequence[Panel]) -> str | None:
    """A panel for each (title, function of its axis), one line for each label; says why there is none."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        return f"no plot: {error}"
    height = max(3.0, 0.28 * len(labels) + 1.5)
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(15, height), sharey=True, squeeze=False, constrained_layout=True
    )
    for axis, (title, draw_panel) in zip(axes[0], panels, strict=True):
        draw_panel(axis)
        axis.set_title(title)
        axis.grid(visible=True, axis="x", which="both", alpha=0.3)
        if labels:
            axis.legend()
    axes[0][0].set_yticks(range(len(labels)), labels, fontsize=7)
    axes[0][0].invert_yaxis()
    machine = results["machine"]
    figure.suptitle(f"{machine['cpu']}, load average {machine['load_average'][0]}")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return None


def _points(axis: Any, name: str, values: Iterable[float | None]) -> None:
    """A mark on the line of each case that has a value."""
    points = [(value, place) for place, value in enumerate(values) if value is not None]
    if points:
        axis.plot(*zip(*points, strict=True), "o", label=name)


def draw(results: Results, path: Path) -> str | None:
    """Left: every contender's time over the collection's. Right: that over its bounds. One line per workload."""
    cases = [row for row in results["rows"] if row.get("table") == STEP]

    def over_collection(axis: Any) -> None:
        axis.set_xscale("log")
        for name in dict.fromkeys(name for case in cases for name in case["ratios"]):
            _points(axis, name, (case["ratios"].get(name) for case in cases))

    def over_bounds(axis: Any) -> None:
        axis.set_xscale("log")
        for bound in ("copy", "random"):
            _points(axis, f"{bound} bound", (case[f"over_{bound}_bound"] for case in cases))

    panels = [("time over the collection's (more is better for us)", over_collection)]
    panels.append(("collection over bound (1 is ideal)", over_bounds))
    return _picture(results, path, [case_name(case) for case in cases], panels)


def draw_phases(results: Results, path: Path) -> str | None:
    """One line per case: ours phase by phase, and the rivals end to end."""
    cases = [row for row in results["rows"] if row.get("table") == STEP and "times" in row]

    def phases(axis: Any) -> None:
        left = [0.0] * len(cases)
        for phase in (*PHASES, "other"):
            widths = [max(0.0, case["times"][case["ours"]][phase]["median_ms"]) for case in cases]
            axis.barh(range(len(cases)), widths, left=left, label=f"ours: {phase}")
            left = [begin + width for begin, width in zip(left, widths, strict=True)]
        for name in dict.fromkeys(name for case in cases for name in case["correct"] if name != "operators"):
            times = (case["times"].get(name, {}).get("end to end", {}).get("median_ms") for case in cases)
            _points(axis, name, times)

    return _picture(results, path, [case["case"] for case in cases], [("ms a step, median", phases)])
