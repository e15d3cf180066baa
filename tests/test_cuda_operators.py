"""The CUDA operators, called from Python without a GPU: their dispatch, and their kernels, executed on the host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cpp_units import Tree

import rec_sdk_torch

TESTS = Path(__file__).parent
RUN = {
    # tests of threads and instruction sets, which apply only to the CPU's own kernels
    "ops": ["-k", "not threads_and_instruction_sets"],
    "tbe/test_oracle.py tbe/test_dtypes.py": [],
}


@pytest.fixture(scope="module")
def library() -> Path:
    package = Path(rec_sdk_torch.__file__).parent
    options = [f"-DPython_EXECUTABLE={sys.executable}", f"-DREC_SDK_PACKAGE={package}"]
    tree = Tree("cuda_operators", TESTS / "cuda_operators", options)
    tree.build()
    return tree.folder / "cuda_operators.so"


@pytest.mark.parametrize("tests", RUN)
def test_passes(library: Path, pytestconfig: pytest.Config, tests: str) -> None:
    """Runs the CPU's operator tests on the CUDA operators."""
    paths = [str(TESTS / "cuda_operators"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUDA_OPERATORS_LIBRARY": str(library),
    }
    options = [*RUN[tests], "--day", str(pytestconfig.getoption("--day"))]
    options += ["--full"] if pytestconfig.getoption("--full") else ["--scenarios", "15"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "cuda_operators_plugin",
        *options,
        *(str(TESTS / test) for test in tests.split()),
    ]
    result = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, cwd=TESTS.parent)
    assert result.returncode == 0, result.stdout + result.stderr
    launches = re.search(r"launched on the host: (\d+)", result.stdout)
    assert launches is not None
    assert int(launches[1]) > 100
