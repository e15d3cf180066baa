"""The register of planted faults: the definition of a plant, and the files that hold them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEVICES = ("cpu", "npu", "npu-late")
"""Where tests run: the CPU, the emulated NPU, and the emulated NPU with streams as late as their events allow."""


class RegisterError(ValueError):
    """A file of the register is incomplete or invalid."""


@dataclass(frozen=True)
class Plant:
    """A plausible mistake, planted to check that a test finds it.

    Attributes:
        room: name of the register's file that holds it.
        name: name of the plant, unique in the register.
        file: path of the file to change, from the root of the repository.
        before: text that occurs once in that file.
        after: the text with the mistake.
        test: test file or test that should fail.
        device: the device on which the test runs, one of `DEVICES`.
    """

    room: str
    name: str
    file: str
    before: str
    after: str
    test: str
    device: str = "cpu"

    def apply(self, text: str) -> str:
        """Returns the file's text with the mistake.

        Raises:
            RegisterError: the text before does not occur exactly once.
        """
        count = text.count(self.before)
        if count != 1:
            raise RegisterError(f"{self.name}: its text occurs {count} times in {self.file}, not once")
        return text.replace(self.before, self.after)


def read_room(file: Path) -> list[Plant]:
    """Reads one TOML file of the register. It has a table for each source file, and in it an array for each fault.

    Raises:
        RegisterError: an array is not [before, after], [before, after, test] or [before, after, test, device], an
            array is [before, after] and its table has no default `test`, or a device is unknown.
    """
    tables: dict[str, dict[str, Any]] = tomllib.loads(file.read_text())
    plants = []
    for source, table in tables.items():
        expected = [table.pop("test")] if "test" in table else []
        for name, texts in table.items():
            try:
                plant = Plant(file.stem, name, source, *texts, *(expected if len(texts) == 2 else []))
            except TypeError as error:
                raise RegisterError(f"{file.name}: {name}: {error}") from error
            if plant.device not in DEVICES:
                raise RegisterError(f"{file.name}: {name}: device {plant.device} is none of {DEVICES}")
            plants.append(plant)
    return plants


def read_plants() -> list[Plant]:
    """Reads all files of the register, in the order of their names."""
    return [plant for file in sorted(HERE.glob("*.toml")) for plant in read_room(file)]
