"""The scripts of the porting guide on two EMULATED NPUs: ids are exchanged over gloo, rows over hccl."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_FILE = Path(__file__).parents[1] / "examples" / "porting.py"
_SPEC = importlib.util.spec_from_file_location("porting", _FILE)
assert _SPEC
assert _SPEC.loader
porting = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(porting)


@pytest.mark.parametrize("script", ["torchrec_ported", "recsdk_script", "recsdk_ported"])
def test_a_script_learns_on_two_npus(script: str) -> None:
    device, first, last = porting.losses(script)
    assert device == "npu"
    assert 0.6 < first < 0.75
    assert last < 0.3


def test_the_lifecycle_script_on_two_npus(tmp_path: Path) -> None:
    porting.check_lifecycle(tmp_path / "saves", "npu")
