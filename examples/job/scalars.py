"""Curves of the caches, kept with each version, drawn as a picture, and written for TensorBoard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.errors import InputError, write_problem

Points = dict[str, list[tuple[int, float]]]
"""The steps and values of each tag."""

PANELS = {
    "share of rows\nthat were in the cache": lambda tag: tag.endswith("/hit_rate") and tag.count("/") > 1,
    "rows that came in,\na step": lambda tag: tag.endswith("/rows_in"),
    "microseconds of a step": lambda tag: tag.endswith(("/wait_us", "/plan_us")),
    "MiB": lambda tag: tag.endswith("_bytes"),
}
"""The label of each panel of the picture, and whether a tag is drawn in it."""


class Scalars:
    """A receiver of scalars with the interface of TensorBoard's SummaryWriter; with a folder, it also passes scalars to
    such a writer.

    `CacheLog` counts steps from the start of the process. Steps here count from the start of the job, over all its
    processes.
    """

    def __init__(self, begin: int, points: Points, tensorboard: Path | None) -> None:
        """Initializes the curves.

        Args:
            begin: steps of the job before this process.
            points: the curves in the version from which the job resumes.
            tensorboard: a folder for event files.

        Raises:
            InputError: TensorBoard is not installed.
        """
        self.begin = begin
        self.points: Points = {tag: list(curve) for tag, curve in points.items()}
        # Steps that a killed process wrote after its last version are written again; `purge_step` removes the earlier
        # points of these steps.
        self._writer = None if tensorboard is None else summary_writer()(str(tensorboard), purge_step=begin + 1)

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Adds a point. `global_step` counts from the start of this process."""
        step = self.begin + global_step
        self.points.setdefault(tag, []).append((step, float(scalar_value)))
        if self._writer is not None:
            self._writer.add_scalar(tag, scalar_value, step)

    def copy(self) -> Points:
        """Returns a copy of the points, to which later points are not added."""
        return {tag: list(curve) for tag, curve in self.points.items()}

    def close(self) -> None:
        """Writes all buffered points."""
        if self._writer is not None:
            self._writer.close()

    def draw(self, path: Path) -> None:
        """Writes the curves as a PNG picture.

        Raises:
            InputError: the file cannot be written.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 11), constrained_layout=True)
        FigureCanvasAgg(figure)
        axes = figure.subplots(len(PANELS), 1, sharex=True)
        for axis, (label, shown) in zip(axes, PANELS.items(), strict=True):
            _panel(axis, label, {tag: curve for tag, curve in self.points.items() if shown(tag)})
        axes[-1].set_xlabel("step")
        try:
            figure.savefig(path, format="png", dpi=100)
        except OSError as error:
            raise write_problem(path, error) from error


def _panel(axis: Any, label: str, curves: Points) -> None:
    scale = 2.0**-20 if label == "MiB" else 1.0
    for tag, curve in curves.items():
        if any(value for _, value in curve):  # draws no curve for a kind of memory that is not used
            name = tag.split("/")[1]  # the table's name, or the counter's name if it counts for a whole collection
            axis.plot([step for step, _ in curve], [value * scale for _, value in curve], label=name)
    axis.set_ylabel(label)
    axis.grid(alpha=0.3)
    if axis.lines:
        axis.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5))


def check_picture(path: Path) -> None:
    """Checks in advance that the picture can be drawn when the job ends.

    Raises:
        InputError: matplotlib is not installed, the file name does not end in .png, or the folder does not exist.
    """
    _require("--plot", "matplotlib", lambda: __import__("matplotlib.figure"))
    if path.suffix.lower() != ".png":
        raise InputError(f"--plot {path}: the name must end in .png")
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(f"--plot {path}: it is a folder, or its folder does not exist")


def summary_writer() -> Any:
    """Returns the class of TensorBoard's writer.

    Raises:
        InputError: TensorBoard is not installed.
    """

    def load() -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter

    return _require("--tensorboard", "tensorboard", load)


def _require(option: str, package: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except ImportError as error:
        raise InputError(f"{option} needs the package {package}: pip install {package}") from error
