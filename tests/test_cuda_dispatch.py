"""The operators on CUDA compile against the installed torch, be it one without CUDA, with which they could not link."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


def test_operators_compile(tmp_path: Path) -> None:
    home = os.environ.get("CUDA_HOME")
    folders = [f"{home}/bin"] if home else [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    nvcc = shutil.which("nvcc", path=os.pathsep.join(folders))
    if nvcc is None:
        pytest.skip("there is no nvcc, in CUDA_HOME, on the path or in /usr/local/cuda")
    headers = ["-I", str(ROOT), "-isystem", str(Path(torch.__file__).parent / "include")]
    # As in torch_npu_ext/cuda/CMakeLists.txt.
    options = ["-std=c++17", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000ULL"]
    warnings = ["-Xcompiler", "-Wall,-Wextra,-Werror"]
    files = ["-c", str(ROOT / "torch_npu_ext/cuda/operators.cpp"), "-o", str(tmp_path / "operators.o")]
    command = [nvcc, *options, *headers, *warnings, *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
