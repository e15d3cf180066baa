"""The strict host implementation of AscendC: its C++ unit tests. No torch, no NPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def find_cmake() -> str | None:
    beside = Path(sys.executable).parent / "cmake"
    return str(beside) if beside.exists() else shutil.which("cmake")


def test_cpp_units(tmp_path: Path) -> None:
    cmake = find_cmake()
    if cmake is None:
        pytest.skip("cmake is not installed")
    configure = [cmake, "-S", str(ROOT / "tests" / "ascendc"), "-B", str(tmp_path)]
    run = [str(Path(cmake).with_name("ctest")), "--output-on-failure", "--no-tests=error"]
    for command in (configure, [cmake, "--build", str(tmp_path), "-j2"], run):
        result = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
