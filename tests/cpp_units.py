"""Builds CMake projects and runs their C++ unit tests.

Build folders are kept in build/tests, so that only changed files are compiled again. A lock per folder prevents two
processes from building in the same folder at once. ccache is used if it is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from filelock import FileLock

TESTS = Path(__file__).resolve().parent
BUILD = TESTS.parent / "build"

_CUDA_FOLDERS = (os.environ.get("CUDA_HOME", "") + "/bin", os.environ.get("PATH", ""), "/usr/local/cuda/bin")
NVCC = shutil.which("nvcc", path=os.pathsep.join(_CUDA_FOLDERS))
"""CUDA's compiler, found where setup.py looks for it; None if it is not there."""

_ENGINE = BUILD / f"engine-{sys.implementation.cache_tag}"
"""The folder in which setup.py builds kernels and engine; `make build` updates them."""


@dataclass(frozen=True)
class Tree:
    """A CMake project of tests, and its build folder in build/tests.

    Attributes:
        name: the build folder's name; each set of options needs its own.
        source: the project's folder.
        options: CMake options, such as `-DREC_SDK_SANITIZE=address`.
    """

    name: str
    source: Path = TESTS
    options: Sequence[str] = field(default_factory=tuple)

    @property
    def folder(self) -> Path:
        """The build folder."""
        return BUILD / "tests" / self.name

    def build(self, *targets: str) -> None:
        """Builds targets, by default all; fails with the output of CMake or the compiler."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder.with_suffix(".lock")):
            result = build_cpp(self.source, self.folder, *self.options, targets=targets or ("all",))
        assert result.returncode == 0, result.stdout + result.stderr

    def run(self, part: str, config: pytest.Config, only: str = "", together: int = 2, **variables: str) -> None:
        """Runs the project's tests; fails with the output of the tests that fail.

        Args:
            part: folder of the project whose tests run; "" for all.
            config: supplies `--full` and the day that seeds random tests.
            only: regular expression for names of tests; by default all run.
            together: number of tests that run in parallel.
            variables: environment variables to set; no library is preloaded.
        """
        variables["REC_SDK_TESTS_DAY"] = str(config.getoption("--day"))
        if config.getoption("--full"):
            variables["REC_SDK_TESTS_FULL"] = "1"
        chosen = ["-R", only] if only else []
        options = ["--output-on-failure", "--no-tests=error", f"-j{together}", *chosen]
        result = _run(self.folder / part, "ctest", *options, **variables)
        assert result.returncode == 0, result.stdout + result.stderr

    def names(self, part: str) -> list[str]:
        """Lists the tests that ctest finds in a built folder of the project."""
        return re.findall(r"Test +#\d+: (\S+)", _run(self.folder / part, "ctest", "-N").stdout)


PLAIN = Tree("plain", options=[f"-DREC_SDK_ENGINE_TREE={_ENGINE}"] if _ENGINE.exists() else [])
"""The tests that need no package."""


def parameters(request: pytest.FixtureRequest, name: str) -> list[str]:
    """Returns all values of a parameter in this session's tests that use the requesting fixture.

    The fixture then builds for all of these tests at once.

    """
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    users = [item for item in items if request.fixturename in item.fixturenames]
    return [item.callspec.params[name] for item in users if item.get_closest_marker("skip") is None]


def build_cpp(
    source: Path, build: Path, *options: str, targets: Sequence[str] = ("all",)
) -> subprocess.CompletedProcess[str]:
    """Builds the project in `source`; returns CMake's completed process if it fails, else the compiler's."""
    build.mkdir(parents=True, exist_ok=True)
    if not (build / "build.ninja").exists():
        ninja = Path(pytest.importorskip("ninja").BIN_DIR) / "ninja"
        configure = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", *options]
        if shutil.which("ccache"):
            configure += [f"-DCMAKE_{language}_COMPILER_LAUNCHER=ccache" for language in ("C", "CXX", "CUDA")]
        result = _run(build, "cmake", "-S", str(source), "-B", str(build), *configure)
        if result.returncode != 0:
            return result
    return _run(build, "cmake", "--build", str(build), "-j2", "--target", *targets)


def _run(folder: Path, program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    programs = Path(pytest.importorskip("cmake").CMAKE_BIN_DIR)
    # Libraries preloaded for this test run, such as an emulated NPU, must not affect the build.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LD_", "REC_SDK_"))} | variables
    command = [str(programs / program), *arguments]
    return subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, env=environment)
