"""The CUDA kernels on the host, thread by thread: the bits of the CPU kernels, and no rule of CUDA broken. No GPU."""

from __future__ import annotations

from pathlib import Path

from cpp_units import run_cpp_units


def test_cpp_units(tmp_path: Path) -> None:
    run_cpp_units("cuda_kernels", tmp_path)
