"""Builds CMake projects, and runs those that are C++ unit tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent

_CUDA_FOLDERS = (os.environ.get("CUDA_HOME", "") + "/bin", os.environ.get("PATH", ""), "/usr/local/cuda/bin")
NVCC = shutil.which("nvcc", path=os.pathsep.join(_CUDA_FOLDERS))
"""CUDA's compiler, found where setup.py looks for it; None if it is not there."""


def run_cpp_units(project: str, build: Path, *options: str, ctest: Sequence[str] = ("-j2",), **variables: str) -> None:
    """Fails with the output of what failed.

    Args:
        project: folder in tests/ with a CMakeLists.txt.
        build: where to build it.
        options: of CMake, such as `-DREC_SDK_SANITIZE=ON`.
        ctest: options of ctest.
        variables: of the environment, beside what there is; nothing is preloaded.
    """
    result = build_cpp(TESTS / project, build, *options, **variables)
    if result.returncode == 0:
        result = _run(build, "ctest", "--output-on-failure", "--no-tests=error", *ctest, **variables)
    assert result.returncode == 0, result.stdout + result.stderr


def build_cpp(source: Path, build: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What CMake, or if it succeeds the compiler, says about the project in the folder `source`."""
    build.mkdir(parents=True, exist_ok=True)
    result = _run(build, "cmake", "-S", str(source), "-B", str(build), *options, **variables)
    if result.returncode == 0:
        result = _run(build, "cmake", "--build", str(build), "-j2", **variables)
    return result


def _run(folder: Path, program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    programs = Path(pytest.importorskip("cmake").CMAKE_BIN_DIR)
    # A test run's own libraries, an emulated NPU's among them, must not come between a test and what it builds.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LD_", "REC_SDK_"))} | variables
    command = [str(programs / program), *arguments]
    return subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, env=environment)
