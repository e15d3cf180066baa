"""Pytest plugin (registered by conftest.py) that prints the seconds of each test folder, and how many tests were left
out.

The budgets in budget.toml are the seconds that a folder may take on two idle cores; the table marks folders over
budget. No test fails because of it, since other work on the machine makes any test slow.
"""

from __future__ import annotations

import tomllib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
NEEDS_FULL = "needs --full"
"""The skip reason of tests that only `make test-full` runs."""

FILES = 8
"""The number of files in the table: the slowest ones."""


@dataclass(eq=False)  # pytest requires hashable plugins
class Durations:
    """The durations of a test run.

    Attributes:
        rooms: seconds by folder of tests, or "tests/*.py".
        files: seconds by file.
        left: by file, number of tests that only the full suite runs.
    """

    rooms: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    files: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    left: Counter[str] = field(default_factory=Counter)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds the duration of a test's setup, call or teardown. With several workers, the main process gets all
        reports.
        """
        file = report.nodeid.partition("::")[0].removeprefix("tests/")
        room = file.partition("/")[0] if "/" in file else "tests/*.py"
        self.files[file] += report.duration
        self.rooms[room] += report.duration
        if report.skipped and NEEDS_FULL in str(report.longrepr):
            self.left[file] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        """Prints the tables."""
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
    """Reads the budgets by folder for a run on the device; returns none for the full suite."""
    if config.getoption("--full"):
        return {}
    budgets: dict[str, dict[str, int]] = tomllib.loads((HERE / "budget.toml").read_text())
    return budgets.get(config.getoption("--device"), {})
