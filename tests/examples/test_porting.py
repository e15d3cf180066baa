"""The porting guide: its scripts train, ports train like their originals, and the guide shows the differences."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from porting import ROOT, RUNS, all_losses, check_lifecycle, losses

pytestmark = pytest.mark.skipif(find_spec("torch_npu") is not None, reason="there the scripts choose the NPU")
pytest.importorskip("torchrec")

WALKS = [("torchrec_script", "torchrec_ported"), ("recsdk_script", "recsdk_ported")]


@pytest.fixture(scope="module")
def results() -> dict[str, tuple[str, float, float]]:
    return {script: losses(script) for script in RUNS}


@pytest.mark.parametrize("script", RUNS)
def test_a_script_learns_on_two_ranks(results: dict[str, tuple[str, float, float]], script: str) -> None:
    device, first, last = results[script]
    assert device == "cpu"
    assert 0.6 < first < 0.75
    assert last < 0.3


def test_both_scripts_for_rec_sdk_print_the_same_losses(results: dict[str, tuple[str, float, float]]) -> None:
    assert results["recsdk_script"] == results["recsdk_ported"]


def test_every_loss_of_the_port_is_torchrecs() -> None:
    """Starting from the same weights, the losses are equal in six digits."""
    ported, original = all_losses("torchrec_ported"), all_losses("torchrec_script")
    assert len(ported) == len(original) == 150
    assert ported == pytest.approx(original, rel=1e-6)


def test_the_lifecycle_script(tmp_path: Path) -> None:
    check_lifecycle(tmp_path / "saves", "cpu")


def test_the_guide_shows_the_diffs() -> None:
    """The diffs that the guide shows are generated when the site is built."""
    guide = (ROOT / "docs" / "porting.md").read_text()
    shown = re.findall(r"^```{literalinclude} .*/(\w+)\.py\n:diff: .*/(\w+)\.py$", guide, re.MULTILINE)
    assert shown == [(ported, script) for script, ported in WALKS]
