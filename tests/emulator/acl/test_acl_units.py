"""The C++ unit tests of the emulated ACL runtime; torch is not loaded; only torch_npu's headers are used."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from cpp_units import TESTS, Tree


def package(name: str) -> Path | None:
    """Returns the folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    locations = spec.submodule_search_locations if spec else None
    return Path(locations[0]) if locations else None


@pytest.mark.parametrize(
    "sanitize",
    [pytest.param("", marks=pytest.mark.full), "address,undefined", pytest.param("thread", marks=pytest.mark.full)],
    ids=["plain", "asan", "tsan"],
)
def test_cpp_units(pytestconfig: pytest.Config, sanitize: str) -> None:
    torch, torch_npu = package("torch"), package("torch_npu")
    if torch_npu is None:
        pytest.skip("torch_npu is not installed")
    options = [f"-DREC_SDK_SANITIZE={sanitize}", f"-DREC_SDK_TORCH={torch}", f"-DREC_SDK_TORCH_NPU={torch_npu}"]
    options.append("-DCMAKE_COMPILE_WARNING_AS_ERROR=ON")
    tree = Tree(f"acl-{sanitize or 'plain'}".replace(",", "-"), TESTS / "emulator" / "acl", options)
    tree.build()
    tree.run("", pytestconfig)
