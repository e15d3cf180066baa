"""Ratios and bounds as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .report import case_name

Result = dict[str, Any]


def draw(results: Result, path: Path) -> None:
    """Left: every contender's time over the collection's. Right: that over its bounds. One line per workload."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    cases = results["steps"]
    height = max(3.0, 0.28 * len(cases) + 1.5)
    figure, (left, right) = plt.subplots(1, 2, figsize=(15, height), sharey=True, constrained_layout=True)
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
    figure.suptitle(f"{results['machine']['cpu']}, load average {results['machine']['load_average'][0]}")
    figure.savefig(path, dpi=110)
    plt.close(figure)
