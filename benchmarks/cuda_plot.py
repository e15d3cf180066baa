"""Steps of the CUDA benchmark as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .cuda_ours import PHASES
from .cuda_report import case_title

Result = dict[str, Any]


def draw(results: Result, path: Path) -> str | None:
    """One line per case: ours phase by phase, and the rivals end to end. Returns why there is no picture."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        return f"no plot: {error}"
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    cases = [case for case in results["steps"] if "absent" not in case]
    figure, axis = plt.subplots(figsize=(13, max(3.0, 0.5 * len(cases) + 1.5)), constrained_layout=True)
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
    figure.suptitle(device["name"] if device["type"] != "cpu" else "the host itself, not a GPU")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return None
