"""C++ unit tests of the CPU kernels, without torch."""

from __future__ import annotations

import pytest
from cpp_units import PLAIN


def test_cpp_units(pytestconfig: pytest.Config) -> None:
    PLAIN.build("kernels/all")
    PLAIN.run("kernels", pytestconfig)
