"""The C++ unit tests of the CPU kernels: no torch between the test and the kernel."""

from __future__ import annotations

import pytest
from cpp_units import PLAIN


def test_cpp_units(pytestconfig: pytest.Config) -> None:
    PLAIN.build("kernels/all")
    PLAIN.run("kernels", pytestconfig)
