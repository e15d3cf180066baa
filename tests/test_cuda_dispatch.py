"""The CUDA operators compile against the installed torch, even if it has no CUDA and they could not be linked."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from cpp_units import NVCC

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(NVCC is None, reason="no nvcc in CUDA_HOME, on the path or in /usr/local/cuda")
def test_operators_compile(tmp_path: Path) -> None:
    headers = ["-I", str(ROOT), "-isystem", str(Path(torch.__file__).parent / "include")]
    # The same options as in torch_npu_ext/cuda/CMakeLists.txt.
    options = ["-std=c++17", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000ULL"]
    warnings = ["-Xcompiler", "-Wall,-Wextra,-Werror"]
    files = ["-c", str(ROOT / "torch_npu_ext/cuda/operators.cpp"), "-o", str(tmp_path / "operators.o")]
    command = [str(NVCC), *options, *headers, *warnings, *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
