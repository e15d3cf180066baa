"""The C++ unit tests of the CPU kernels: no torch between the test and the kernel."""

from __future__ import annotations

from pathlib import Path

from cpp_units import run_cpp_units


def test_cpp_units(tmp_path: Path) -> None:
    # The other instruction sets take most of the compile time; tests/ops/test_same_bits.py compares them.
    run_cpp_units("kernels", tmp_path, "-DREC_SDK_BASELINE_ONLY=ON")
