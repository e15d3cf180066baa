"""The register of planted faults fits the code as it is now. Planting them is `python -m tests.plants`."""

from __future__ import annotations

from collections import Counter

import pytest
from register import ROOT, RegisterError, Room, read_rooms

ROOMS = read_rooms()


def test_names_are_unique() -> None:
    names = Counter(plant.name for room in ROOMS for plant in room.plants)
    assert [name for name, count in names.items() if count > 1] == []
    assert len(names) >= 80


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_every_plant_fits(room: Room) -> None:
    wrong = []
    for plant in room.plants:
        try:
            if plant.apply((ROOT / plant.file).read_text()) == (ROOT / plant.file).read_text():
                wrong.append(f"{plant.name} changes nothing")
        except (OSError, RegisterError) as error:
            wrong.append(str(error))
    assert wrong == []


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_its_tests_exist(room: Room) -> None:
    assert room.plants
    assert any(room.tests.values())
    named = [path for paths in room.tests.values() for path in paths]
    for plant in room.plants:
        file, _, case = plant.test.partition("::")
        named.append(file)
        assert case.partition("[")[0] in (ROOT / file).read_text(), plant.name
    assert [path for path in named if not (ROOT / path).exists()] == []
