"""Plants the faults of the register one by one, and tells which of them the tests find.

python -m tests.plants                            every room, with the tests of `make test`
python -m tests.plants --room planner --stage full
python -m tests.plants --plant sums-start-at-one

It works in a copy of the tree, which it builds once and keeps in build/plants. A plant is found if the test that is
expected to see it fails, or else if another test of its room does. Hours for all rooms.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.plants.register import ROOT, Plant, RegisterError, Room, read_rooms

SECONDS = 1200
"""Tests that take longer hang, by which the plant is found."""

PROJECTS = {
    "torch_npu_ext/engine": {"cpu": {"engine"}, "npu": {"engine"}},
    "torch_npu_ext/ops": {"cpu": {"engine"}, "npu": {"engine", "npu"}},
    "torch_npu_ext/npu": {"npu": {"npu"}},
    "emulator": {"npu": {"emulator"}},
    "op_kernels": {"cpu": {"engine"}, "npu": {"engine", "emulator"}},
}
"""Projects that setup.py has to build for tests on a device, after a change in a folder."""

EMULATE = [".venv-npu/bin/python", "-m", "rec_sdk_torch.emulate"]
PYTHONS = {
    "cpu": [".venv/bin/python", "-m", "pytest"],
    "npu": [*EMULATE, "-m", "pytest", "--device", "npu"],
    "npu-late": [*EMULATE, "--streams", "late", "-m", "pytest", "--device", "npu"],
}


class BuildError(RuntimeError):
    """A plant does not compile."""


@dataclass(frozen=True)
class Outcome:
    """The stage that found a plant, or "none"; the test that failed, or why there is none."""

    plant: Plant
    found: str
    by: str
    seconds: float


class Copy:
    """A copy of the tree, built, with a plant in it now and then."""

    def __init__(self, folder: Path, devices: set[str]) -> None:
        self.folder = folder
        self._stale: set[str] = {"engine"} | ({"npu", "emulator"} if devices - {"cpu"} else set())
        self._planted: set[str] = set()
        self._synchronise()

    def _synchronise(self) -> None:
        """Brings what has changed; files that have not keep their times, so that little is built again."""
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

    def build(self, projects: set[str]) -> None:
        """Builds projects of setup.py in place, and those that still have a plant which is no longer in the source.

        Raises:
            BuildError: with the compiler's first error.
        """
        self._planted |= projects
        wanted = self._stale | projects
        if not wanted:
            return
        python = ROOT / (".venv-npu" if wanted & {"npu", "emulator"} else ".venv") / "bin/python"
        command = [str(python), "setup.py", "--quiet", "build_ext", "--inplace", "--projects", ",".join(sorted(wanted))]
        done = subprocess.run(command, cwd=self.folder, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            lines = (done.stdout + done.stderr).splitlines()
            raise BuildError(next((line for line in lines if "error:" in line), lines[-1]))
        self._stale = set()

    @contextmanager
    def with_plant(self, plant: Plant) -> Iterator[None]:
        """Within, the file has the mistake."""
        file = self.folder / plant.file
        text = file.read_text()
        file.write_text(plant.apply(text))
        try:
            yield
        finally:
            file.write_text(text)
            self._stale, self._planted = self._stale | self._planted, set()

    def failure(self, device: str, tests: Sequence[str], full: bool) -> str:
        """The first of the tests that fails; "" if all pass."""
        command = [str(ROOT / PYTHONS[device][0]), *PYTHONS[device][1:], "-x", "-p", "no:cacheprovider", *tests]
        environment = os.environ | {"PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        run = subprocess.Popen(
            [*command, *(["--full"] if full else [])],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = run.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return f"it hangs: {' '.join(tests)}"
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()
        if run.returncode == 0:
            return ""
        if run.returncode == 5:  # pytest's, for no test
            raise RegisterError(f"no test is in {' '.join(tests)}")
        failed = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        return (
            failed[0].split(" ", 1)[1].split(" - ")[0] if failed else f"{' '.join(tests)}: exit status {run.returncode}"
        )


def built_for(plant: Plant, device: str) -> set[str]:
    """Projects of setup.py that a plant changes, for tests on the device."""
    for folder, projects in PROJECTS.items():
        if plant.file.startswith(folder):
            return projects.get(device.removesuffix("-late"), set())
    return set()


def examine(copy: Copy, room: Room, plant: Plant, full: bool) -> Outcome:
    """Plants it and runs tests until one fails."""
    start = time.monotonic()
    others = [(device, room.tests[device]) for device in ("cpu", "npu") if room.tests[device]]
    stages = [("fast", False), ("full", True)] if full else [("fast", False)]
    found, by = "none", ""
    with copy.with_plant(plant):
        try:
            for stage, everything in stages:
                for device, tests in [(plant.device, [plant.test]), *others]:
                    copy.build(built_for(plant, device))
                    by = copy.failure(device, tests, everything)
                    if by:
                        found = stage
                        break
                if by:
                    break
        except (BuildError, RegisterError) as error:
            found, by = "invalid", str(error)
    return Outcome(plant, found, by, time.monotonic() - start)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.plants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    rooms = read_rooms()
    parser.add_argument("--room", choices=[room.name for room in rooms], action="append", help="default: all")
    parser.add_argument("--plant", action="append", help="only plants of this name")
    parser.add_argument("--stage", choices=["fast", "full"], default="fast", help="full: what fast misses, with --full")
    parser.add_argument("--tree", type=Path, default=ROOT / "build" / "plants", help="the copy (default: %(default)s)")
    options = parser.parse_args(arguments)
    chosen = [
        (room, plant)
        for room in rooms
        if options.room is None or room.name in options.room
        for plant in room.plants
        if options.plant is None or plant.name in options.plant
    ]
    if not chosen:
        parser.error("no plant of the register is chosen")
    devices = {plant.device for _, plant in chosen}
    devices |= {device for room, _ in chosen for device, tests in room.tests.items() if tests}
    copy = Copy(options.tree, devices)
    outcomes = []
    for room, plant in chosen:
        outcome = examine(copy, room, plant, options.stage == "full")
        outcomes.append(outcome)
        print(f"| {room.name} | {plant.name} | {outcome.found} | {outcome.by} | {outcome.seconds:.0f} |", flush=True)
    counts = {kind: sum(o.found == kind for o in outcomes) for kind in ("fast", "full", "none", "invalid")}
    print(", ".join(f"{kind} {count}" for kind, count in counts.items()))
    return 1 if counts["invalid"] else 0


if __name__ == "__main__":
    sys.exit(main())
