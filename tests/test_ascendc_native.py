"""C++ unit tests of the AscendC emulator on the host; they need neither torch nor an NPU."""

from __future__ import annotations

import pytest
from cpp_units import PLAIN


def test_cpp_units(pytestconfig: pytest.Config) -> None:
    PLAIN.build("ascendc/all")
    # The tests do not run in parallel, because one of them prints times.
    PLAIN.run("ascendc", pytestconfig, together=1)
