"""The AscendC kernels on emulated vector cores: the bits of the CPU kernels, and no rule of the hardware broken."""

from __future__ import annotations

from pathlib import Path

from cpp_units import run_cpp_units


def test_cpp_units(tmp_path: Path) -> None:
    run_cpp_units("ascendc_kernels", tmp_path)
