"""The names of dynamicemb that rec_sdk_torch.compat provides, tested in separate processes on `--device`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import forked_python
import pytest
import torch

pytest.importorskip("torchrec")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATHS = {"PYTHONPATH": f"{ROOT}:{HERE}", "OMP_NUM_THREADS": "1"}
COMPAT = ("-m", "rec_sdk_torch.compat")


@pytest.fixture(autouse=True)
def _no_cuda(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("the names of CUDA mean CUDA there")


def test_the_tests_under_dynamicemb_pass() -> None:
    files = ("under_dynamicemb.py", "under_dynamicemb_models.py")
    command = (*COMPAT, "-m", "pytest", *files, "-p", "no:cacheprovider")
    finished = forked_python.python(*command, folder=HERE, **PATHS)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    passed = re.search(r"(\d+) passed", finished.stdout)
    assert passed, finished.stdout
    texts = [(HERE / file).read_text() for file in files]
    assert int(passed[1]) >= sum(len(re.findall(r"^def test_", text, re.MULTILINE)) for text in texts)


def results(script: str, folder: Path, *arguments: str) -> list[Any]:
    finished = forked_python.torchrun(2, *COMPAT, HERE / f"{script}.py", folder / script, *arguments, **PATHS)
    assert finished.returncode == 0, finished.stderr
    return [json.loads((folder / f"{script}{rank}").read_text()) for rank in range(2)]


def test_a_script_of_dynamicemb_runs_unchanged(device: torch.device, tmp_path: Path) -> None:
    """The script also runs with another `dist_type`; a model with a third `dist_type` then loads the dump."""
    found = results("dynamicemb_script", tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    others = results("dynamicemb_script", elsewhere, "hash_roundrobin", "continuous")
    assert [each["losses"] for each in found] == results("dynamicemb_twin", tmp_path)
    assert [each["losses"] for each in others] == [each["losses"] for each in found]
    assert [each["sizes"] for each in others] != [each["sizes"] for each in found]
    for each in found + others:
        assert each["device"].startswith(device.type)
        assert len(set(each["losses"])) == 12
        assert each["evaluated"] == each["loaded"]
        assert len(set(each["evaluated"])) == 12
        assert all(0 < size["item"] <= 112 for size in each["sizes"])  # rows of a rank
        assert each["admitting"][0]["item"] < each["sizes"][0]["item"]
