"""Saves of former versions load bit by bit."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from former_saves import EXPECTED, MODELS, SAVES, plain
from tables import loaded, written

import rec_sdk_torch as rst
from rec_sdk_torch.checkpoint.__main__ import main
from rec_sdk_torch.saves.format.manifest import read_manifest

VERSIONS = sorted(folder.name for folder in SAVES.iterdir())
SAVED = [(version, name) for version in VERSIONS for name in MODELS if (SAVES / version / f"{name}.zip").exists()]


def test_there_are_saves_of_this_version() -> None:
    assert {name for version, name in SAVED if version == rst.__version__} == set(MODELS), (
        "python tests/saves/former_saves.py writes them"
    )


@pytest.mark.parametrize("name", MODELS)
def test_archived_models_can_be_written(name: str, tmp_path: Path) -> None:
    """Before a release, `former_saves.py` writes these saves."""
    expected = plain(MODELS[name].write(tmp_path))
    assert json.loads(json.dumps(expected)) == expected
    assert main(["verify", str(tmp_path / MODELS[name].place)]) == 0


def assert_same_options(found: Any, expected: Any) -> None:
    """Compares a save's steps and options. Options that the optimizer has gained since the save must be off."""
    assert found.keys() == expected.keys()
    for step in expected:
        now, then = (dict(ast.literal_eval(bytes.fromhex(part[step]).decode())) for part in (found, expected))
        assert {name: now[name] for name in then} == then
        assert not any(value for name, value in now.items() if name not in then)


@pytest.mark.parametrize(("version", "name"), SAVED)
def test_former_saves_load(version: str, name: str, tmp_path: Path) -> None:
    """After each load, this version writes a delta of the loaded save."""
    shutil.unpack_archive(SAVES / version / f"{name}.zip", tmp_path)
    expected, path = json.loads((tmp_path / EXPECTED).read_text()), tmp_path / MODELS[name].place
    model = MODELS[name].make()
    loaded(path, model)
    found = plain(MODELS[name].contents(model))
    assert found.keys() == expected.keys()
    for part in expected:
        if part.startswith("optimizer"):
            assert_same_options(found[part], expected[part])
        else:
            assert found[part] == expected[part], part
    assert main(["verify", str(path)]) == 0
    tracked = name != "sharded"  # its tables do not track changes
    last = read_manifest(Path(rst.Saver().get_latest_load_path(path)))
    now = written(model, path, incremental=tracked)
    assert now.previous == (last.id if tracked else None)
