"""Plants the faults of the register one by one, and reports which of them the tests find.

python -m tests.plants                            every room, with the tests of `make test`
python -m tests.plants --room planner --full      what they miss, again with --full
python -m tests.plants --plant sums-start-at-one

It works in copies of the source tree, which it builds once and keeps in build/plants. A plant counts as found if the
test that is expected to fail does, or else if another test fails that the plant's room names.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import queue
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.plants.register import HERE, ROOT, Plant, RegisterError, read_plants

SECONDS = 1200
"""The time limit of the tests. Tests that exceed it hang, so they detect the plant."""

KINDS = ("expected", "other", "full", "none", "invalid")
"""A plant is found by the expected test, by another of its room, only with --full, or not; or it does not compile."""

PROJECTS = {
    "torch_npu_ext/engine": {"cpu": {"engine"}, "npu": {"engine"}},
    "torch_npu_ext/ops": {"cpu": {"engine"}, "npu": {"engine", "npu"}},
    "torch_npu_ext/npu": {"npu": {"npu"}},
    "emulator": {"npu": {"emulator"}},
    "op_kernels": {"cpu": {"engine"}, "npu": {"engine", "emulator"}},
}
"""The projects that setup.py must build for tests on a device after a change in a folder."""

EMULATED = {
    "npu": ["-m", "rec_sdk_torch.emulate", "-m", "pytest", "--device", "npu"],
    "npu-late": ["-m", "rec_sdk_torch.emulate", "--streams", "late", "-m", "pytest", "--device", "npu"],
}
"""Arguments of Python that run pytest on an emulated NPU."""

QUICK_BUILD = "-DREC_SDK_BASELINE_ONLY=ON -DREC_SDK_OPTIMIZE=-O1"
"""CMake options for the copies of the repository, which are built again for each plant in C++."""

OWN_BUILDS = "tests/test_host_engine.py::test_cpp_units"
"""Tests that compile the code they run, and need no library of the package."""


class BuildError(RuntimeError):
    """The code with a plant does not compile."""


@dataclass(frozen=True)
class Outcome:
    """The result for a plant: how it was found and by which test, or that no test found it.

    Attributes:
        room: name of the register's file.
        plant: name of the plant.
        found: one of `KINDS`.
        by: the test that failed.
        seconds: time that building and testing took.
    """

    room: str
    plant: str
    found: str
    by: str
    seconds: int


class Copy:
    """A built copy of the source tree, in which plants are applied one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stale = {"engine", "npu", "emulator"}
        self._planted: set[str] = set()
        self._synchronise()
        self._build({"engine"})
        command = [str(ROOT / ".venv/bin/python"), str(HERE / "forking_server.py")]
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
        self._server = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _synchronise(self) -> None:
        """Copies changed files into the tree; other files keep their times, so that little is rebuilt."""
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
        wanted = {name for name in names if (ROOT / name).is_file()}
        there = {str(file.relative_to(self.folder)) for file in self.folder.rglob("*") if file.is_file()}
        for name in there - wanted:
            if name.endswith((".py", ".cpp", ".h", ".cu", ".asc")) and not name.startswith("build/"):
                (self.folder / name).unlink()
        for name in wanted:
            source, target = ROOT / name, self.folder / name
            if not target.exists() or target.read_bytes() != source.read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)

    def build(self, plant: Plant, device: str) -> None:
        """Builds what the plant changes for tests on the device, and rebuilds projects that still contain the previous
        plant.

        Raises:
            BuildError: with the compiler's first error.
        """
        kind = device.removesuffix("-late")
        planted = next((by.get(kind, set()) for folder, by in PROJECTS.items() if plant.file.startswith(folder)), set())
        usable = {"engine"} if kind == "cpu" else {"engine", "npu", "emulator"}
        wanted = planted | (self._stale & usable)
        self._planted |= planted
        if wanted:
            self._build(wanted)

    def _build(self, projects: set[str]) -> None:
        python = ROOT / (".venv-npu" if projects & {"npu", "emulator"} else ".venv") / "bin/python"
        names = ",".join(sorted(projects))
        command = [str(python), "setup.py", "--quiet", "build_ext", "--inplace", "--projects", names]
        environment = os.environ | {"CMAKE_ARGS": QUICK_BUILD}
        done = subprocess.run(command, cwd=self.folder, env=environment, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            lines = (done.stdout + done.stderr).splitlines()
            raise BuildError(next((line for line in lines if "error:" in line), lines[-1]))
        self._stale -= projects

    @contextmanager
    def with_plant(self, plant: Plant) -> Iterator[None]:
        """Applies the plant's mistake to its file within the block."""
        file = self.folder / plant.file
        text = file.read_text()
        file.write_text(plant.apply(text))
        try:
            yield
        finally:
            file.write_text(text)
            self._stale, self._planted = self._stale | self._planted, set()

    def failure(self, device: str, tests: Sequence[str], full: bool) -> str:
        """Returns the first failing test; "" if all pass.

        Raises:
            RegisterError: pytest finds no test.
        """
        arguments = ["-x", "-p", "no:cacheprovider", *tests, *(["--full"] if full else [])]
        output = self.folder / "build" / "output.txt"
        status = self._forked(arguments, output) if device == "cpu" else self._emulated(device, arguments, output)
        if status == 0:
            return ""
        if status == -9:
            return f"it hangs: {' '.join(tests)}"
        if status == 5:  # pytest's exit status if there is no test
            raise RegisterError(f"no test is in {' '.join(tests)}")
        failed = [line for line in output.read_text().splitlines() if line.startswith(("FAILED ", "ERROR "))]
        first = failed[0].split(" ", 1)[1].split(" - ")[0] if failed else f"{' '.join(tests)}: exit status {status}"
        return first.removeprefix("tests/")

    def _forked(self, arguments: Sequence[str], output: Path) -> int:
        order = {"folder": str(self.folder), "arguments": arguments, "seconds": SECONDS, "output": str(output)}
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def _emulated(self, device: str, arguments: Sequence[str], output: Path) -> int:
        command = ["timeout", "--signal=KILL", str(SECONDS), str(ROOT / ".venv-npu/bin/python"), *EMULATED[device]]
        environment = os.environ | {"PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        with output.open("w") as file:
            done = subprocess.run(
                [*command, *arguments],
                cwd=self.folder,
                env=environment,
                check=False,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        return -9 if done.returncode == 137 else done.returncode


def examine(copy: Copy, plant: Plant, others: Sequence[str], full: bool) -> Outcome:
    """Applies a plant and runs tests until one fails: the expected one, other test files of the room, then with
    --full.
    """
    start = time.monotonic()
    runs = [("expected", plant.device, [plant.test], False)]
    runs += [("other", "cpu", others, False)]
    runs += [("full", "cpu", others, True)] if full else []
    found, by = "none", ""
    with copy.with_plant(plant):
        try:
            for kind, device, tests, everything in runs:
                if not tests[0].startswith(OWN_BUILDS):
                    copy.build(plant, device)
                by = copy.failure(device, tests, everything)
                if by:
                    found = kind
                    break
        except (BuildError, RegisterError) as error:
            found, by = "invalid", str(error)
    return Outcome(plant.room, plant.name, found, by, round(time.monotonic() - start))


def write_table(outcomes: Sequence[Outcome], file: Path) -> None:
    """Writes the results as a page: counts by room, and the plants that their expected test misses."""
    commit = subprocess.run(["git", "log", "-1", "--format=%h"], cwd=ROOT, check=True, capture_output=True, text=True)
    counts = Counter((outcome.room, outcome.found) for outcome in outcomes)
    rooms = sorted({outcome.room for outcome in outcomes})
    lines = [
        "# Planted faults, and what finds them",
        "",
        f"Written by `python -m tests.plants --write` on {time.strftime('%Y-%m-%d')}, commit {commit.stdout.strip()}.",
        "*expected*: the test that the register names fails. *other*: another test of its room does. *full*: one does,",
        "with `--full`. *none*: no test of its room fails. *invalid*: it does not compile.",
        "",
        f"| room | {' | '.join(KINDS)} |",
        "|---" * (1 + len(KINDS)) + "|",
        *(f"| {room} | {' | '.join(str(counts[room, kind]) for kind in KINDS)} |" for room in rooms),
        f"| **all** | {' | '.join(str(sum(counts[room, kind] for room in rooms)) for kind in KINDS)} |",
    ]
    missed = [outcome for outcome in outcomes if outcome.found != "expected"]
    if missed:
        lines += ["", "| plant | found | by |", "|---|---|---|"]
        lines += [f"| {each.plant} | {each.found} | {each.by} |" for each in missed]
    file.write_text("\n".join(lines) + "\n")


def read_record(file: Path) -> dict[str, Outcome]:
    """Reads the outcomes of an interrupted run, by plant."""
    if not file.exists():
        return {}
    outcomes = (Outcome(**json.loads(line)) for line in file.read_text().splitlines())
    return {outcome.plant: outcome for outcome in outcomes}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 1 if a plant is invalid."""
    parser = argparse.ArgumentParser(prog="python -m tests.plants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    plants = read_plants()
    parser.add_argument(
        "--room", choices=sorted({plant.room for plant in plants}), action="append", help="default: all"
    )
    parser.add_argument("--plant", action="append", help="only plants of this name")
    parser.add_argument("--full", action="store_true", help="run what the fast tests miss again with --full")
    parser.add_argument("--jobs", type=int, default=2, help="copies that are tested at once (default: %(default)s)")
    parser.add_argument("--record", type=Path, help="file of outcomes: a run that was stopped goes on behind them")
    parser.add_argument("--write", action="store_true", help="write the table to tests/plants/found.md")
    options = parser.parse_args(arguments)
    record = read_record(options.record) if options.record else {}
    chosen = [
        plant
        for plant in plants
        if (options.room is None or plant.room in options.room)
        and (options.plant is None or plant.name in options.plant)
        and plant.name not in record
    ]
    if not chosen and not record:
        parser.error("no plant of the register is chosen")
    files = {
        room: sorted(
            {plant.test.partition("::")[0] for plant in plants if plant.room == room and plant.device == "cpu"}
        )
        for room in {plant.room for plant in plants}
    }
    copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for number in range(min(options.jobs, len(chosen))):
        copies.put(Copy(ROOT / "build" / "plants" / str(number)))

    def run(plant: Plant) -> Outcome:
        copy = copies.get()
        try:
            return examine(copy, plant, files[plant.room], options.full)
        finally:
            copies.put(copy)

    with ThreadPoolExecutor(max(1, options.jobs)) as pool:
        for outcome in pool.map(run, chosen):
            record[outcome.plant] = outcome
            print(*(f"| {value} " for value in dataclasses.astuple(outcome)), "|", sep="", flush=True)
            if options.record:
                with options.record.open("a") as file:
                    file.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
    outcomes = list(record.values())
    counts = Counter(outcome.found for outcome in outcomes)
    print(", ".join(f"{kind} {counts[kind]}" for kind in KINDS))
    if options.write:
        write_table(outcomes, HERE / "found.md")
    return 1 if counts["invalid"] else 0


if __name__ == "__main__":
    sys.exit(main())
