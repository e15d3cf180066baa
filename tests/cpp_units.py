"""Builds a project of C++ unit tests, and runs them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent


def run_cpp_units(project: str, build: Path, *options: str, ctest: Sequence[str] = ("-j2",), **variables: str) -> None:
    """Fails with the output of what failed.

    Args:
        project: folder in tests/ with a CMakeLists.txt.
        build: where to build it.
        options: of CMake, such as `-DREC_SDK_SANITIZE=ON`.
        ctest: options of ctest.
        variables: of the environment, beside what there is; nothing is preloaded.
    """
    programs = Path(pytest.importorskip("cmake").CMAKE_BIN_DIR)
    # A test run's own libraries, an emulated NPU's among them, must not come between a test and what it builds.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LD_", "REC_SDK_"))} | variables
    for program, *arguments in (
        ("cmake", "-S", str(TESTS / project), "-B", str(build), *options),
        ("cmake", "--build", str(build), "-j2"),
        ("ctest", "--output-on-failure", "--no-tests=error", *ctest),
    ):
        command = [str(programs / program), *arguments]
        result = subprocess.run(command, check=False, cwd=build, capture_output=True, text=True, env=environment)
        assert result.returncode == 0, result.stdout + result.stderr
