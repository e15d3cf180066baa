"""The C++ unit tests of the emulated ACL runtime; nothing of torch is loaded, only torch_npu's headers are used."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest


def package(name: str) -> Path | None:
    """The folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    locations = spec.submodule_search_locations if spec else None
    return Path(locations[0]) if locations else None


@pytest.mark.parametrize(
    "sanitize", ["", "address,undefined", pytest.param("thread", marks=pytest.mark.slow)], ids=["plain", "asan", "tsan"]
)
def test_cpp_units(tmp_path: Path, sanitize: str) -> None:
    torch, torch_npu = package("torch"), package("torch_npu")
    if torch_npu is None:
        pytest.skip("torch_npu is not installed")
    cmake = pytest.importorskip("cmake").CMAKE_BIN_DIR
    # The emulator that the session itself may run on must not get between the test and the one it builds.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LD_", "REC_SDK_"))}
    configure = ["cmake", "-S", str(Path(__file__).parent), "-B", str(tmp_path), f"-DREC_SDK_SANITIZE={sanitize}"]
    configure += [f"-DREC_SDK_TORCH={torch}", f"-DREC_SDK_TORCH_NPU={torch_npu}", "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON"]
    build = ["cmake", "--build", str(tmp_path), "-j2"]
    run = ["ctest", "--output-on-failure", "--no-tests=error", "--timeout", "120"]
    for command in (configure, build, run):
        command[0] = str(Path(cmake) / command[0])
        result = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, env=env)
        assert result.returncode == 0, result.stdout + result.stderr
