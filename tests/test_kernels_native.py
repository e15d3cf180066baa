"""The C++ unit tests of the CPU kernels: no torch between the test and the kernel."""

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
    # The other instruction sets take most of the compile time; tests/ops/test_same_bits.py compares them.
    configure = [cmake, "-S", str(ROOT / "tests" / "kernels"), "-B", str(tmp_path), "-DREC_SDK_BASELINE_ONLY=ON"]
    run = [str(Path(cmake).with_name("ctest")), "--output-on-failure", "--no-tests=error"]
    for command in (configure, [cmake, "--build", str(tmp_path), "-j2"], run):
        result = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
