"""Scalar instructions of the AscendC kernels: what the counter counts, and that the kernels keep to a budget."""

from __future__ import annotations

import platform

import numpy as np
import pytest

from benchmarks.npu_scalar import Budget, ScalarUnits, budget, with_counters

BUDGET = Budget(lookup=13, pooled=54, moved_row=15, row=111, further=78, many=42)
"""Instructions at D = 128 with room for another compiler."""

KERNEL = """f:
	.cfi_startproc
	movl	$1, %eax
.L2:
	addl	%eax, %ebx
#APP
# 12 "kernel_operator.h" 1
	movq %rax, operands(%rip)
	call copy #scalar
# 0 "" 2
#NO_APP
	cmpl	$3, %ebx
	jne	.L2
	xorl	%eax, %eax
	ret
"""


def test_every_block_counts_its_instructions_once() -> None:
    counted = with_counters(KERNEL).splitlines()
    added = [line.partition("$")[2].partition(",")[0] for line in counted if "scalar_unit_count" in line]
    assert added == ["1", "4", "2"]
    assert [line for line in counted if line in KERNEL.splitlines()] == KERNEL.splitlines()
    after = [counted[i - 2] for i, line in enumerate(counted) if "scalar_unit_count" in line]
    assert after == ["\t.cfi_startproc", ".L2:", "\tjne\t.L2"]


@pytest.fixture(scope="module")
def units(tmp_path_factory: pytest.TempPathFactory) -> ScalarUnits:
    if platform.machine() != "x86_64":
        pytest.skip("scalar instructions are counted in x86-64 code")
    return ScalarUnits(tmp_path_factory.mktemp("scalar"))


def test_the_budget(units: ScalarUnits) -> None:
    found = budget(units)
    print(found)
    over = {name: value for name, value in found._asdict().items() if not 5 < value <= getattr(BUDGET, name)}
    assert not over


def test_counts_are_the_same_on_every_run(units: ScalarUnits) -> None:
    slots = np.random.default_rng(1).integers(0, 500, 3000)
    assert units.count(slots, 500, 20) == units.count(slots, 500, 20)
