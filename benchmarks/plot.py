"""Steps as pictures: ratios and bounds on the CPU, phases on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .phases import PHASES
from .report import case_name, case_title

Result = dict[str, Any]


def _plots() -> Any:
    """Draws to files; ImportError where there is no matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, title: str, path: Path) -> None:
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    _plots().close(figure)


def draw(results: Result, path: Path) -> None:
    """Left: every contender's time over the collection's. Right: that over its bounds. One line per workload."""
    cases = results["steps"]
    height = max(3.0, 0.28 * len(cases) + 1.5)
    figure, (left, right) = _plots().subplots(1, 2, figsize=(15, height), sharey=True, constrained_layout=True)
    places = list(range(len(cases)))
    for name in dict.fromkeys(name for case in cases for name in case["ratios"]):
        points = [(case["ratios"][name], place) for place, case in enumerate(cases) if name in case["ratios"]]
        left.plot(*zip(*points, strict=True), "o", label=name)
    for key, label in (("over_copy_bound", "copy bound"), ("over_random_bound", "random-access bound")):
        right.plot([case[key] for case in cases], places, "o", label=label)
    left.set_yticks(places, [case_name(case) for case in cases], fontsize=7)
    left.invert_yaxis()
    for axis, title in (
        (left, "time over the collection's (more is better for us)"),
        (right, "collection over bound (1 is ideal)"),
    ):
        axis.set_xscale("log")
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.grid(visible=True, axis="x", which="both", alpha=0.3)
        axis.set_title(title)
        if cases:
            axis.legend()
    _save(figure, f"{results['machine']['cpu']}, load average {results['machine']['load_average'][0]}", path)


def draw_phases(results: Result, path: Path) -> str | None:
    """One line per case: ours phase by phase, and the rivals end to end. Returns why there is no picture."""
    try:
        plots = _plots()
    except ImportError as error:
        return f"no plot: {error}"
    cases = [case for case in results["steps"] if "absent" not in case]
    figure, axis = plots.subplots(figsize=(13, max(3.0, 0.5 * len(cases) + 1.5)), constrained_layout=True)
    places = list(range(len(cases)))
    left = [0.0] * len(cases)
    for phase in (*PHASES, "other"):
        widths = [max(0.0, case["times"][case["ours"]][phase]["median_ms"]) for case in cases]
        axis.barh(places, widths, left=left, label=f"ours: {phase}")
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    rivals = dict.fromkeys(name for case in cases for name in case["correct"] if not name.startswith("collection"))
    for name in rivals:
        points = [
            (case["times"][name]["end to end"]["median_ms"], place)
            for place, case in enumerate(cases)
            if name in case["times"] and all(case["correct"][name].values())
        ]
        if points:
            axis.plot(*zip(*points, strict=True), "o", label=name)
    axis.set_yticks(places, [case_title(case) for case in cases], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("ms a step, median")
    axis.grid(visible=True, axis="x", alpha=0.3)
    if cases:
        axis.legend()
    device = results["machine"]["device"]
    _save(figure, device["name"] if device["type"] != "cpu" else "the host itself, not a GPU", path)
    return None
