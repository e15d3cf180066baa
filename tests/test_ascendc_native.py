"""The strict host implementation of AscendC: its C++ unit tests. No torch, no NPU."""

from __future__ import annotations

import pytest
from cpp_units import PLAIN


def test_cpp_units(pytestconfig: pytest.Config) -> None:
    PLAIN.build("ascendc/all")
    # One after the other: one of them prints times.
    PLAIN.run("ascendc", pytestconfig, together=1)
