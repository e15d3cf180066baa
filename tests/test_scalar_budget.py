"""Scalar instructions of the AscendC kernels: the counter is correct, and the kernels stay within a budget."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.npu_scalar import MACHINES, Budget, CountingError, ScalarUnits, budget, npu_scalar, with_counters

BUDGETS = {
    "x86_64": Budget(lookup=12, pooled=18, moved_row=13, swapped_row=33, row=91, further=39, many=39),
    "aarch64": Budget(lookup=11, pooled=19, moved_row=12, swapped_row=30, row=88, further=32, many=36),
}
"""The most scalar instructions of each counted unit of work at D = 128, with a margin for other compilers."""

GCC_X86_64 = """f:
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
GCC_AARCH64 = """f:
	.cfi_startproc
	mov	w0, 1
.L2:
	add	w1, w1, w0
#APP
// 12 "kernel_operator.h" 1
	str x0, [x16]
	bl copy //scalar
// 0 "" 2
#NO_APP
	bfi	x2, x3, 4, 12
	tbnz	w1, 3, .L2
	mov	w0, 0
	ret
"""
CLANG_AARCH64 = """f:                                      // @f
// %bb.0:
	.cfi_startproc
	mov	w0, #1
.LBB0_1:                                // =>This Inner Loop Header: Depth=1
	add	w1, w1, w0
	//APP
	str	x0, [x16]
	bl	copy //scalar

	//NO_APP
	b.ne	.LBB0_1
// %bb.2:
	bl	g
	mov	w0, wzr
	ret
"""


def added_counters(text: str, machine: str) -> list[tuple[int, str]]:
    """Returns each counter's increment in the instrumented text, and the first instruction after it."""
    pattern = {
        "x86_64": r"\tpushfq\n\taddq\t\$(\d+), scalar_unit_count\(%rip\)\n\tpopfq\n(.*)\n",
        "aarch64": r"\tadd\tx17, x17, #(\d+)\n\tstr.*scalar_unit_count\]\n\tldp.*\n(.*)\n",
    }[machine]
    return [(int(count), after.strip()) for count, after in re.findall(pattern, with_counters(text, MACHINES[machine]))]


def test_every_block_counts_its_instructions_once() -> None:
    assert added_counters(GCC_X86_64, "x86_64") == [
        (1, "movl\t$1, %eax"),
        (4, "addl\t%eax, %ebx"),
        (2, "xorl\t%eax, %eax"),
    ]
    assert added_counters(CLANG_AARCH64, "aarch64") == [(1, "mov\tw0, #1"), (3, "add\tw1, w1, w0"), (3, "bl\tg")]
    assert added_counters(GCC_AARCH64, "aarch64") == [(1, "mov\tw0, 1"), (4, "add\tw1, w1, w0"), (2, "mov\tw0, 0")]


def test_counters_change_no_lines_except_short_branches() -> None:
    def kept_lines(text: str, machine: str) -> list[str]:
        lines = with_counters(text, MACHINES[machine]).splitlines()
        return [line for line in lines if line in text.splitlines()]

    assert kept_lines(GCC_X86_64, "x86_64") == GCC_X86_64.splitlines()
    assert kept_lines(CLANG_AARCH64, "aarch64") == CLANG_AARCH64.splitlines()
    assert kept_lines(GCC_AARCH64, "aarch64") == [line for line in GCC_AARCH64.splitlines() if "tbnz" not in line]
    assert "\ttbz\tw1, 3, 1f\n\tb\t.L2\n1:\n" in with_counters(GCC_AARCH64, MACHINES["aarch64"])


def test_a_block_of_many_instructions_has_two_counters() -> None:
    assert [count for count, _ in added_counters("f:\n" + 5000 * "\tnop\n" + "\tret\n", "aarch64")] == [
        5001 - 4095,
        4095,
    ]


def test_a_compiler_for_another_machine_is_named(tmp_path: Path) -> None:
    other = tmp_path / "c++"
    other.write_text("#!/bin/sh\necho riscv64-linux-gnu\n")
    other.chmod(0o755)
    with pytest.raises(CountingError, match="x86_64 or aarch64; this is riscv64-linux-gnu"):
        ScalarUnits(tmp_path, str(other))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--compiler", "nocc"], "nocc -dumpmachine cannot run"), (["--run", "noqemu"], "--run: noqemu is no program")],
)
def test_counting_that_is_impossible_ends_with_a_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert npu_scalar.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def units(tmp_path_factory: pytest.TempPathFactory) -> ScalarUnits:
    if platform.machine() not in MACHINES:
        pytest.skip(f"scalar instructions are counted in code for {' or '.join(MACHINES)}")
    return ScalarUnits(tmp_path_factory.mktemp("scalar"), every=False)


def test_the_budget(units: ScalarUnits) -> None:
    found, budgeted = budget(units), BUDGETS[units.machine]
    print(found)
    over = {name: value for name, value in found._asdict().items() if not 5 < value <= getattr(budgeted, name)}
    assert not over


def test_counts_are_the_same_on_every_run(units: ScalarUnits) -> None:
    slots = np.random.default_rng(1).integers(0, 500, 3000)
    assert units.count(slots, 500, 20) == units.count(slots, 500, 20)
