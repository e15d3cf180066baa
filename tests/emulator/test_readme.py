"""A user's own kernel and script run on the EMULATED NPU as emulator/README.md describes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "emulator" / "README.md").read_text()
FILES = dict(re.findall(r"^```(?:cpp|python)\n(?://|#) (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
COMMANDS = re.findall(r"^((?:FLAGS|g\+\+|\$REPO/\.venv-npu).*)$", PAGE, re.MULTILINE)
PRINTED = re.findall(r"^It prints `(.*?)`", PAGE, re.MULTILINE)


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    python = command.replace("$REPO/.venv-npu/bin/python", sys.executable)
    return subprocess.run(
        python,
        shell=True,
        cwd=folder,
        env=os.environ | {"REPO": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the files of the page to a folder outside of the repository."""
    folder = tmp_path_factory.mktemp("own")
    assert sorted(FILES) == ["run.cpp", "script.py", "twice.asc"]
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def test_the_readmes_kernel_runs(folder: Path) -> None:
    flags, engine, build_and_run, _ = COMMANDS
    run_it = f"{flags}; {build_and_run}"
    compiled = run(f"{flags}; {engine}", folder)
    assert compiled.returncode == 0, compiled.stderr
    finished = run(run_it, folder)
    assert finished.stdout == PRINTED[0] + "\n", finished.stderr

    kernel = folder / "twice.asc"
    kernel.write_text(kernel.read_text().replace("    a = in.DeQue<float>();\n", ""))
    broken = run(run_it, folder)
    assert broken.returncode != 0
    error = re.findall(r"^kernel 'twice'.*?(?=^```)", PAGE, re.MULTILINE | re.DOTALL)[0]
    assert " ".join(error.split()) in broken.stderr


def test_the_readmes_script_runs(folder: Path) -> None:
    finished = run(COMMANDS[-1], folder)
    assert finished.stdout.splitlines()[-1:] == PRINTED[1:], finished.stderr
