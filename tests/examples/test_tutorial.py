"""The tutorial: each step runs and prints what its page says, and each page shows the step before as it is."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import warm

pytestmark = pytest.mark.skipif(find_spec("torch_npu") is not None, reason="the scripts are for the CPU")
pytest.importorskip("torchrec")

ROOT = Path(__file__).parents[2]
STEPS = sorted((ROOT / "examples" / "tutorial").glob("step*.py"))
NUMBER = re.compile(r"\d[\d.]*")
"""A loss, a share, or the time in the name of a save."""


def page_of(step: Path) -> str:
    return (ROOT / "docs" / "tutorial" / f"{step.stem.removeprefix('step')}.md").read_text()


def promised(step: Path) -> str:
    (block,) = re.findall(r"^```text\n(.*?)^```$", page_of(step), re.MULTILINE | re.DOTALL)
    return str(block)


def losses(text: str) -> list[float]:
    lines = [line for line in text.splitlines() if line.startswith("loss")]
    return [float(number) for line in lines for number in NUMBER.findall(line)]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By step, what it prints; steps before the fourth are for one process."""
    found = {}
    for number, step in enumerate(STEPS, start=1):
        folder = tmp_path_factory.mktemp(step.stem)
        if number < 4:
            done = warm.python(step, folder=folder, PYTHONPATH=str(ROOT))
        else:
            done = warm.torchrun(2, step, "saves", folder=folder, PYTHONPATH=str(ROOT))
        assert done.returncode == 0, done.stderr
        assert "UserWarning: the device cache" not in done.stderr
        found[step.stem] = done.stdout
    return found


def test_there_are_six() -> None:
    assert [int(step.stem[4]) for step in STEPS] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.stem)
def test_it_prints_what_its_page_says(printed: dict[str, str], step: Path) -> None:
    """Word by word; numbers depend on the machine and on time, losses only a little."""
    there, here = promised(step), printed[step.stem]
    assert NUMBER.sub("0", there) == NUMBER.sub("0", here)
    assert losses(here) == pytest.approx(losses(there), abs=0.02)


def test_a_cache_and_prefetching_learn_what_torchrec_learns(printed: dict[str, str]) -> None:
    plain, cached, prefetched = (losses(printed[step.stem]) for step in STEPS[:3])
    assert cached == prefetched
    assert cached == pytest.approx(plain, abs=0.02)


def test_a_load_and_a_server_have_the_loss_of_the_model(printed: dict[str, str]) -> None:
    (line,) = re.findall(r"^loss on five .*$", printed["step6_served"], re.MULTILINE)
    (served,) = re.findall(r"^loss of the served model: (.*)$", printed["step6_served"], re.MULTILINE)
    assert set(NUMBER.findall(line)) == {served}


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.stem)
def test_its_page_shows_the_step_before(step: Path) -> None:
    """The difference is made when the site is built."""
    page, number = page_of(step), STEPS.index(step)
    assert f"{{literalinclude}} ../../examples/tutorial/{step.name}\n" in page
    shown = re.findall(r"^:diff: \.\./\.\./examples/tutorial/(.*)$", page, re.MULTILINE)
    assert shown == ([STEPS[number - 1].name] if number else [])
    (command,) = re.findall(r"^(?:python|torchrun) .*$", page, re.MULTILINE)
    assert command in step.read_text().splitlines()[0]
