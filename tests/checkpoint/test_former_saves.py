"""Saves that former versions wrote are loaded with the bits that they had."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from former_saves import MODELS, SAVES, plain

import rec_sdk_torch as rst

VERSIONS = sorted(folder.name for folder in SAVES.iterdir())


def test_there_are_saves_of_this_version() -> None:
    assert rst.__version__ in VERSIONS, "python tests/checkpoint/former_saves.py writes them"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", MODELS)
def test_they_load(name: str, version: str, tmp_path: Path) -> None:
    path = shutil.copytree(SAVES / version / name, tmp_path / name)
    expected = json.loads((path / "expected.json").read_text())
    model = MODELS[name].make()
    rst.Saver().load(model, path)
    found = plain(MODELS[name].contents(model))
    assert found.keys() == expected.keys()
    for part in expected:
        assert found[part] == expected[part], part
