"""The AscendC kernels on emulated vector cores: results are bit-identical to the CPU kernels', and no hardware rule is
broken.
"""

from __future__ import annotations

import re

import pytest
from cpp_units import PLAIN

PART = "ascendc_kernels"
UNITS = (
    "ascendc_updates$",
    "ascendc_updates_late$",
    "ascendc_updates_random_1$",
    "ascendc_updates_a5$",
    "ascendc_update_costs$",
    "ascendc_lookup",
    "ascendc_swap_lookups",
    "ascendc_(copies|row_copies|planes|tile_plan|optimizer_shapes|host_pass)",
)
"""The tests of ctest, in parts of about equal duration."""


@pytest.mark.parametrize("unit", UNITS)
def test_cpp_units(pytestconfig: pytest.Config, unit: str) -> None:
    PLAIN.build(f"{PART}/all")
    PLAIN.run(PART, pytestconfig, only=unit)


def test_every_unit_is_run() -> None:
    PLAIN.build(f"{PART}/all")
    names = PLAIN.names(PART)
    assert len(names) > 10
    assert [name for name in names if sum(bool(re.search(unit, name)) for unit in UNITS) != 1] == []
