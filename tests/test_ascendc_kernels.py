"""The AscendC kernels on emulated vector cores: the bits of the CPU kernels, and no rule of the hardware broken."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from test_kernels_native import find_cmake

ROOT = Path(__file__).resolve().parent.parent


def test_cpp_units(tmp_path: Path) -> None:
    cmake = find_cmake()
    if cmake is None:
        pytest.skip("cmake is not installed")
    configure = [cmake, "-S", str(ROOT / "tests" / "ascendc_kernels"), "-B", str(tmp_path)]
    run = [str(Path(cmake).with_name("ctest")), "--output-on-failure", "--no-tests=error", "-j2"]
    for command in (configure, [cmake, "--build", str(tmp_path), "-j2"], run):
        result = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
