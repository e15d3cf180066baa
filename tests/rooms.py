"""Prints the seconds that each room of the tests took, and the tests left to the full suite. A plugin of conftest.py.

A room is a folder of tests, or the files beside them. Its budget, in budget.toml, is what it may take on two quiet
cores; the table marks a room that has outgrown it. Nothing fails by it: other work on a machine makes any test slow.
"""

from __future__ import annotations

import tomllib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
NEEDS_FULL = "needs --full"
"""Begins the reason of a skip that is none of `make test-full`."""

FILES = 8
"""Files in the table: those that took longest."""


@dataclass(eq=False)  # plugins are hashed
class Times:
    """The seconds of a run.

    Attributes:
        rooms: seconds by room.
        files: seconds by file.
        left: by file, how many tests only the full suite runs.
    """

    rooms: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    files: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    left: Counter[str] = field(default_factory=Counter)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds a test's set-up, call or end. With more workers than one, this is called where all reports come."""
        file = report.nodeid.partition("::")[0].removeprefix("tests/")
        room = file.partition("/")[0] if "/" in file else "tests/*.py"
        self.files[file] += report.duration
        self.rooms[room] += report.duration
        if report.skipped and NEEDS_FULL in str(report.longrepr):
            self.left[file] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        """The tables."""
        if not self.files:
            return
        budgets = read_budgets(config)
        write = terminalreporter.write_line
        write("seconds by room, of all workers together (budget):")
        for room, seconds in sorted(self.rooms.items(), key=lambda each: -each[1]):
            budget = budgets.get(room)
            over = "  over" if budget is not None and seconds > budget else ""
            write(f"  {room:<20}{seconds:7.1f}{'' if budget is None else f' ({budget})'}{over}")
        slowest = sorted(self.files.items(), key=lambda each: -each[1])[:FILES]
        write("slowest files: " + ", ".join(f"{file} {seconds:.0f}" for file, seconds in slowest))
        if self.left:
            files = ", ".join(f"{file} {count}" for file, count in self.left.most_common())
            write(f"left to `make test-full`: {sum(self.left.values())} tests: {files}")


def read_budgets(config: pytest.Config) -> dict[str, int]:
    """Seconds by room for a run on the device; none for the full suite."""
    if config.getoption("--full"):
        return {}
    budgets: dict[str, dict[str, int]] = tomllib.loads((HERE / "budget.toml").read_text())
    return budgets.get(config.getoption("--device"), {})
