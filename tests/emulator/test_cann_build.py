"""The build of the NPU kernels with a stand-in for CANN: CMake finds CANN and passes the correct compiler arguments.

The code that launches the kernels compiles.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import torch_npu

ROOT = Path(__file__).resolve().parents[2]
CANN = Path(__file__).with_name("cann")
LARGE = {"accumulate_rows", "lookup_pooled", "pooled_weights_grad", "update_rows"}
"""Kernels whose jumps may exceed the range of one instruction."""


def install_cann(root: Path, config: str) -> None:
    """Installs the stand-in's files as CANN's packages would; `config` is the folder of asc-config.cmake."""
    modules = root / "compiler/tikcpp/ascendc_kernel_cmake/asc_modules"
    shutil.copytree(CANN, modules, ignore=shutil.ignore_patterns("asc-config.cmake", "*.py", "__pycache__"))
    (root / config).mkdir(parents=True, exist_ok=True)
    shutil.copy(CANN / "asc-config.cmake", root / config)
    (root / "bin").mkdir()
    (root / "bin/bisheng").symlink_to(CANN / "bisheng.py")


def configure(build: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs CMake's configuration with CANN discoverable only through environment variables."""
    own = ("ASC", "CMAKE_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    command = ["cmake", "-S", str(ROOT / "op_kernels/ascendc"), "-B", str(build)]
    return subprocess.run(command, env=environment | variables, capture_output=True, text=True, check=False)


def adjacent(call: list[str], first: str, second: str) -> bool:
    """Returns whether two arguments are adjacent."""
    return (first, second) in pairwise(call)


@pytest.mark.parametrize("config", ["lib64/cmake", "compiler/tikcpp/ascendc_kernel_cmake"])
def test_cmake_finds_cann(tmp_path: Path, config: str) -> None:
    install_cann(tmp_path / "cann", config)
    found = configure(tmp_path / "build", ASCEND_HOME_PATH=str(tmp_path / "cann"))
    assert found.returncode == 0, found.stdout + found.stderr


def test_without_cann_the_build_fails_with_a_hint(tmp_path: Path) -> None:
    found = configure(tmp_path / "build")
    assert found.returncode != 0
    assert "ASCEND_HOME_PATH is not set: source CANN's set_env.sh first" in found.stderr
    assert found.stderr.count("CMake Error") == 1


def test_cann_without_ascendc_is_refused(tmp_path: Path) -> None:
    found = configure(tmp_path / "build", ASCEND_HOME_PATH=str(tmp_path))
    assert found.returncode != 0
    assert "has no asc-config.cmake: CANN 8.5 or later is needed" in " ".join(found.stderr.split())
    assert found.stderr.count("CMake Error") == 1


def test_kernels_for_an_npu(tmp_path: Path) -> None:
    install_cann(tmp_path / "cann", "lib64/cmake")
    log = tmp_path / "bisheng.log"
    headers = Path(torch_npu.__file__).parent / "include/third_party/acl/inc"
    found = configure(tmp_path / "build", ASCEND_HOME_PATH=str(tmp_path / "cann"))
    assert found.returncode == 0, found.stdout + found.stderr
    environment = {**os.environ, "REC_SDK_BISHENG_LOG": str(log), "REC_SDK_ACL_HEADERS": str(headers)}
    build = ["cmake", "--build", str(tmp_path / "build")]
    done = subprocess.run(build, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    compiled = [line.split() for line in log.read_text().splitlines() if " -c " in line]
    sources = {Path(call[-1]).relative_to(ROOT).as_posix() for call in compiled}
    kernels = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("op_kernels/*/ascendc.asc")}
    assert sources == {*kernels, "op_kernels/ascendc/runtime.asc"}
    assert len(kernels) == 10
    for call in compiled:
        # With the compiler's own barriers and waits, each row's copy could wait for the previous row's.
        assert "--cce-auto-sync=off" in call
        assert "--npu-arch=dav-2201" in call
        assert "-ffp-contract=off" in call
        assert [option for option in call if option.startswith("-O")] == ["-O3"]
        assert [option for option in call if option.startswith("-std=")] == ["-std=c++17"]
        large = Path(call[-1]).parent.name in LARGE
        assert adjacent(call, "-mllvm", "-cce-aicore-jump-expand=true") == large
