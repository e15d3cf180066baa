"""How many instructions the scalar unit of each vector core issues for the AscendC kernels. Counted, not measured.

A vector core has one scalar unit: it computes every address, and issues every copy and vector instruction. The
kernels are compiled for this machine's x86-64 with the instructions that CANN's headers issue for each call
(`scalar_unit/kernel_operator.h`), a counter is put into every basic block of the assembler's text, and the kernels run,
core after core. So the counts are exact, the same on every run of the same compiler, and those of another instruction
set: the scalar unit has more registers, and no operands in memory.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .ids import Distribution

ROOT = Path(__file__).resolve().parents[1]
_SOURCES = Path(__file__).resolve().parent / "scalar_unit"

_FLAGS = (
    *("-std=c++17", "-O2", "-fno-exceptions", "-fno-asynchronous-unwind-tables", "-ffp-contract=off", "-w"),
    # The scalar unit has no vectors of its own.
    *("-fno-tree-vectorize", "-fno-tree-slp-vectorize"),
    # A string instruction would count once, a call of the library not at all; the counters use the stack.
    *("-fno-builtin", "-mstringop-strategy=unrolled_loop", "-mno-red-zone", "-fcf-protection=none"),
)
_MARK = "#scalar"

Counts = Mapping[str, Mapping[str, list[int]]]
"""Instructions of each core, by operator and kernel."""


def with_counters(assembler: str) -> str:
    """Assembler's text in which every basic block first adds its number of instructions to `scalar_unit_count`.

    Of what the source writes in assembler, lines with the mark count.
    """
    lines: list[str] = []
    block = 0  # where the counter of the block goes
    count = 0
    written = False  # by the source

    def close() -> None:
        nonlocal count
        if count:
            counter = f"\tpushfq\n\taddq\t${count}, scalar_unit_count(%rip)\n\tpopfq"
            lines.insert(block, counter)
        count = 0

    for line in assembler.splitlines():
        if line.startswith(("#APP", "#NO_APP")):
            written = line.startswith("#APP")
        label = re.match(r"[.\w$]+:", line)
        instruction = not label and line.startswith("\t") and not line.startswith(("\t.", "\t#"))
        if label:
            close()
        if label or (instruction and count == 0):
            block = len(lines) + (1 if label else 0)
        lines.append(line)
        if instruction and (not written or _MARK in line):
            count += 1
        if instruction and not written and line.startswith(("\tj", "\tret")):
            close()
    close()
    return "\n".join(lines) + "\n"


class ScalarUnits:
    """The kernels of every operator, compiled to count."""

    def __init__(self, folder: Path) -> None:
        """Compiles into `folder`; RuntimeError where the machine is no x86-64 or the compiler fails."""
        if platform.machine() != "x86_64":
            raise RuntimeError(f"scalar instructions are counted in x86-64 code; this machine is {platform.machine()}")
        self._folder = folder
        self._program = folder / "scalar_unit"
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        text, counted = folder / "kernels.s", folder / "counted.s"
        include = [f"-I{_SOURCES}", f"-I{ROOT}"]
        _compile([*compiler, *_FLAGS, *include, "-S", str(_SOURCES / "kernels.cpp"), "-o", str(text)])
        counted.write_text(with_counters(text.read_text()))
        hardware = str(_SOURCES / "hardware.cpp")
        _compile([*compiler, "-std=c++17", "-O2", str(counted), hardware, "-o", str(self._program)])

    def count(self, slots: npt.NDArray[np.int64], rows: int, dim: int, cores: int = 48) -> Counts:
        """Every operator on one batch: `slots` `[N]`, each in `[0, rows)`."""
        path = self._folder / "slots"
        path.write_bytes(slots.astype(np.int32).tobytes())
        numbers = [str(number) for number in (rows, dim, cores)]
        done = subprocess.run([str(self._program), str(path), *numbers], check=True, capture_output=True, text=True)
        counts: Counts = json.loads(done.stdout)
        return counts


def _compile(command: Sequence[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr}")


class Budget(NamedTuple):
    """Instructions of one core for one more of each, apart from what a launch begins with."""

    lookup: float
    """`lookup_sequence`, fp32."""
    pooled: float
    """`lookup_pooled`, fp32, in bags of 8."""
    moved_row: float
    """`gather_rows`."""
    row: float
    """`update_rows`, Adam, of a row with one lookup."""
    further: float
    """Of its second lookup."""
    many: float
    """Of each further lookup in a row of 32."""


def budget(units: ScalarUnits, dim: int = 128, cores: int = 8) -> Budget:
    """What one more lookup or row costs: the difference of two batches, over the difference of their sizes."""

    def total(rows: int, lookups: int) -> dict[str, int]:
        """Of each operator, on all cores, with every row looked up so many times."""
        slots = np.random.default_rng(0).permutation(np.repeat(np.arange(rows), lookups))
        return {name: sum(kernels[name.split()[0]]) for name, kernels in units.count(slots, rows, dim, cores).items()}

    few, many = 1024, 3072
    rows = many - few
    one, one_less = total(many, 1), total(few, 1)
    each = {name: (one[name] - one_less[name]) / rows for name in one}

    def of_row(lookups: int) -> float:
        name = "update_rows adam"
        return (total(many // lookups, lookups)[name] - total(few // lookups, lookups)[name]) / (rows // lookups)

    row = each["update_rows adam"]
    return Budget(
        each["lookup_sequence float32"],
        each["lookup_pooled float32"],
        each["gather_rows"],
        row,
        of_row(2) - row,
        (of_row(32) - row) / 31,
    )


def main() -> int:
    """Prints the budget, and each operator's busiest core on 65,536 uniform lookups."""
    with tempfile.TemporaryDirectory() as folder:
        units = ScalarUnits(Path(folder))
        print("Scalar instructions, counted, D = 128:")
        for name, value in budget(units)._asdict().items():
            print(f"  {name:<12}{value:8.1f}")
        slots = Distribution.parse("uniform").draw(np.random.default_rng(0), 100_000, 65_536)
        print("Of the busiest of 48 cores, 65,536 uniform lookups of 100,000 rows:")
        for operator, kernels in units.count(slots, 100_000, 128).items():
            counts = ", ".join(f"{kernel} {max(cores):,}" for kernel, cores in kernels.items())
            print(f"  {operator:<28}{counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
