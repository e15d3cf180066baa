"""The register of planted faults matches the code. `python -m tests.plants` plants them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from register import HERE, ROOT, RegisterError, read_room

FILES = sorted(HERE.glob("*.toml"))


def test_names_are_unique() -> None:
    names = Counter(plant.name for file in FILES for plant in read_room(file))
    assert [name for name, count in names.items() if count > 1] == []
    assert len(names) >= 500


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_plant_fits(file: Path) -> None:
    """Each plant's original text occurs once in its source file, and its expected test exists."""
    wrong = []
    for plant in read_room(file):
        source = (ROOT / plant.file).read_text()
        test, _, case = plant.test.partition("::")
        try:
            if plant.apply(source) == source:
                wrong.append(f"{plant.name} changes nothing")
            if case.partition("[")[0] not in (ROOT / test).read_text():
                wrong.append(f"{plant.name}: {plant.test} does not exist")
        except (OSError, RegisterError) as error:
            wrong.append(str(error))
    assert wrong == []
