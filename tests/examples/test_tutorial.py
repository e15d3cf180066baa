"""Each step of the tutorial runs and prints what its section says, and each section shows its script."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import forked_python
import pytest

pytestmark = pytest.mark.skipif(find_spec("torch_npu") is not None, reason="the scripts are for the CPU")
pytest.importorskip("torchrec")

ROOT = Path(__file__).parents[2]
STEPS = sorted((ROOT / "examples" / "tutorial").glob("step*.py"))
SECTIONS = (ROOT / "docs" / "tutorial" / "steps.md").read_text().split("\n## ")[1:]
NUMBER = re.compile(r"\d[\d.]*")
"""A number in the output that may differ: a loss, a fraction, or the time in the name of a save."""


def expected_output(section: str) -> str:
    (block,) = re.findall(r"^```text\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return str(block)


def losses(text: str) -> list[float]:
    lines = [line for line in text.splitlines() if line.startswith("loss")]
    return [float(number) for line in lines for number in NUMBER.findall(line)]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Runs each step and returns the outputs; the last step reads the saves of the step before it."""
    folder = tmp_path_factory.mktemp("steps")
    found = []
    for step, section in zip(STEPS, SECTIONS, strict=True):
        if "\ntorchrun " in section:
            done = forked_python.torchrun(2, step, "saves", folder=folder, PYTHONPATH=str(ROOT))
        else:
            done = forked_python.python(step, "saves", folder=folder, PYTHONPATH=str(ROOT))
        assert done.returncode == 0, done.stderr
        assert "UserWarning: the device cache" not in done.stderr
        found.append(done.stdout)
    return found


@pytest.mark.parametrize("number", range(6))
def test_each_step_prints_what_its_section_shows(printed: list[str], number: int) -> None:
    """Words must match. Numbers may differ, since they depend on the machine and on time; losses vary only slightly."""
    there, here = expected_output(SECTIONS[number]), printed[number]
    assert NUMBER.sub("0", there) == NUMBER.sub("0", here)
    assert losses(here) == pytest.approx(losses(there), abs=0.02)


def test_a_cache_and_prefetching_learn_what_torchrec_learns(printed: list[str]) -> None:
    plain, cached, prefetched = map(losses, printed[:3])
    assert cached == prefetched
    assert cached == pytest.approx(plain, abs=0.02)


def test_a_load_and_a_server_have_the_loss_of_the_model(printed: list[str]) -> None:
    (line,) = re.findall(r"^loss on five .*$", printed[4], re.MULTILINE)
    (served,) = NUMBER.findall(printed[5].removesuffix("\n"))
    assert set(NUMBER.findall(line)) == {served}


@pytest.mark.parametrize("number", range(6))
def test_its_section_shows_its_script(number: int) -> None:
    step, section = STEPS[number], SECTIONS[number]
    assert int(step.stem[4]) == int(section[0])
    assert re.findall(r"^```{literalinclude} \.\./\.\./examples/tutorial/(.*)$", section, re.MULTILINE) == [step.name]
    (command,) = re.findall(r"^(?:python|torchrun) .*$", section, re.MULTILINE)
    assert command in step.read_text().splitlines()[0]
