"""The register of planted faults: what a plant is, and the files that hold them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEVICES = ("cpu", "npu", "npu-late")
"""Where tests run: the CPU, the emulated NPU, and that with streams as late as their events allow."""


class RegisterError(ValueError):
    """A file of the register does not say what a plant needs."""


@dataclass(frozen=True)
class Plant:
    """One believable mistake.

    Attributes:
        name: unique in the register.
        file: path of the file it is planted in, from the root of the repository.
        before: text that occurs once in that file.
        after: the text with the mistake.
        test: test file, or test, that is expected to see it.
        device: where that test runs, one of `DEVICES`.
    """

    name: str
    file: str
    before: str
    after: str
    test: str
    device: str = "cpu"

    def apply(self, text: str) -> str:
        """The file's text with the mistake.

        Raises:
            RegisterError: the text before does not occur exactly once.
        """
        count = text.count(self.before)
        if count != 1:
            raise RegisterError(f"{self.name}: its text occurs {count} times in {self.file}, not once")
        return text.replace(self.before, self.after)


@dataclass(frozen=True)
class Room:
    """The plants of one room, and the tests that a change there should run.

    Attributes:
        name: name of its file.
        tests: by device, test files and folders.
        plants: in the order of the file.
    """

    name: str
    tests: dict[str, list[str]]
    plants: list[Plant]


def read_room(file: Path) -> Room:
    """One file of the register.

    Raises:
        RegisterError: a key is missing, or a key or a device is unknown.
    """
    content: dict[str, Any] = tomllib.loads(file.read_text())
    try:
        plants = [Plant(**entry) for entry in content.pop("plant")]
        room = Room(file.stem, {device: content.pop(device, []) for device in ("cpu", "npu")}, plants)
    except (KeyError, TypeError) as error:
        raise RegisterError(f"{file.name}: {error}") from error
    wrong = sorted({plant.device for plant in plants} - set(DEVICES)) + sorted(content)
    if wrong:
        raise RegisterError(f"{file.name}: {wrong} is not known")
    return room


def read_rooms() -> list[Room]:
    """All files of the register, by name."""
    return [read_room(file) for file in sorted(HERE.glob("*.toml"))]
