"""The strict host implementation of AscendC: its C++ unit tests. No torch, no NPU."""

from __future__ import annotations

from pathlib import Path

from cpp_units import run_cpp_units


def test_cpp_units(tmp_path: Path) -> None:
    # One after the other: one of them prints times.
    run_cpp_units("ascendc", tmp_path, ctest=())
