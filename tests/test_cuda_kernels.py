"""The CUDA kernels, run on the host thread by thread: results are bit-identical to the CPU kernels', and no CUDA rule
is broken.
"""

from __future__ import annotations

import pytest
from cpp_units import PLAIN, Tree


@pytest.mark.parametrize("part", ["cuda_updates_0", "cuda_updates_1", "cuda_[^u]"])
def test_cpp_units(pytestconfig: pytest.Config, part: str) -> None:
    tree = PLAIN
    if pytestconfig.getoption("--full"):
        tree = Tree("undefined", options=[*PLAIN.options, "-DREC_SDK_ALL_UNDEFINED=ON"])
    tree.build("cuda_kernels/all")
    tree.run("cuda_kernels", pytestconfig, only=part)
