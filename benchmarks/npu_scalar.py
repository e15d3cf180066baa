"""Scalar instructions of the AscendC kernels on each vector core: counted, not measured on a chip.

A vector core has one scalar unit: it computes every address, and issues every copy and vector instruction. The kernels
are compiled for x86-64 or 64-bit Arm with the instructions that CANN's headers issue for each call
(`scalar_unit/kernel_operator.h`). A counter is inserted into every basic block of the assembler text, and the kernels
run, core after core. So the counts are exact, and the same for every run with the same compiler, but they are counts
for another instruction set than the chip's. The scalar unit has many registers and no operands in memory, and CANN's
compiler is based on Clang. So Clang's code for 64-bit Arm is closest to the chip's code.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .ids import Distribution
from .runner import CannotRunError, Option, Row, benchmark

ROOT = Path(__file__).resolve().parents[1]
_SOURCES = Path(__file__).resolve().parent / "scalar_unit"
_PROGRAMS = ROOT / "build" / "scalar_unit"
"""The folder of compiled programs, named by the digest of their sources, since compiling takes most of a minute."""

_FLAGS = (
    *("-std=c++17", "-O2", "-fno-exceptions", "-fno-asynchronous-unwind-tables", "-ffp-contract=off", "-w"),
    # The scalar unit has no vector instructions.
    *("-fno-tree-vectorize", "-fno-tree-slp-vectorize"),
    # Instructions in a library call would not be counted.
    "-fno-builtin",
)
_GCC_ON_X86 = "-mstringop-strategy=unrolled_loop"  # a string instruction repeats, but would be counted once

Counts = Mapping[str, Mapping[str, list[int]]]
"""The instructions of each core, by operator and kernel."""


def _far_test(instruction: str) -> str:
    """Replaces a test-bit branch, whose range is 32 KiB, with the inverse test around an unconditional branch."""
    test = re.match(r"\ttb(n?)z\t(.*), (\S+)", instruction)
    if not test:
        return instruction
    inverse = "" if test[1] else "n"
    return f"\ttb{inverse}z\t{test[2]}, 1f\n\tb\t{test[3]}\n1:"


class Machine(NamedTuple):
    """An instruction set whose instructions are counted.

    Attributes:
        flags: compiler flags.
        comment: prefix of a comment, including the marker lines around inline assembler.
        ends_block: matches an instruction that ends a basic block.
        counter: adds `{count}`, below 4,096, to `scalar_unit_count`, and preserves every register and flag.
        far: rewrites an instruction so that it reaches targets that counters have moved.
    """

    flags: tuple[str, ...]
    comment: str
    ends_block: re.Pattern[str]
    counter: str
    far: Callable[[str], str] = str


MACHINES = {
    "x86_64": Machine(
        ("-mno-red-zone", "-fcf-protection=none"),  # the counters use the stack
        "#",
        re.compile(r"\t(j|ret)"),
        "\tpushfq\n\taddq\t${count}, scalar_unit_count(%rip)\n\tpopfq",
    ),
    "aarch64": Machine(
        (),
        "//",
        re.compile(r"\t(b|br|ret|cbn?z|tbn?z|b\.?(eq|ne|hs|cs|lo|cc|mi|pl|vs|vc|hi|ls|ge|lt|gt|le|al))\b"),
        "\tstp\tx16, x17, [sp, #-16]!\n\tadrp\tx16, scalar_unit_count\n"
        "\tldr\tx17, [x16, :lo12:scalar_unit_count]\n\tadd\tx17, x17, #{count}\n"
        "\tstr\tx17, [x16, :lo12:scalar_unit_count]\n\tldp\tx16, x17, [sp], #16",
        _far_test,
    ),
}


def with_counters(assembler: str, machine: Machine) -> str:
    """Inserts code into assembler so that each basic block first adds its number of instructions to
    `scalar_unit_count`.

    Inline assembler lines of the source count only if they are marked with a comment `scalar`.
    """
    lines: list[str] = []
    block = 0  # position of the block's counter
    count = 0
    written = False  # whether the lines come from inline assembler
    mark = f"{machine.comment}scalar"

    def close() -> None:
        nonlocal count
        while count:
            part = min(count, 4095)
            lines.insert(block, machine.counter.format(count=part))
            count -= part

    for line in assembler.splitlines():
        # GCC writes #APP for every machine, Clang with the machine's comment.
        edge = re.match(r"\s*(?:#|//)\s?(NO_)?APP\b", line)
        if edge:
            written = not edge[1]
        label = re.match(r"[.\w$]+:", line)
        instruction = not label and re.match(r"\t[a-z]", line)
        if label:
            close()
        if label or (instruction and count == 0):
            block = len(lines) + (1 if label else 0)
        lines.append(machine.far(line) if instruction else line)
        if instruction and (not written or mark in line):
            count += 1
        if instruction and not written and machine.ends_block.match(line):
            close()
    close()
    return "\n".join(lines) + "\n"


class CountingError(CannotRunError):
    """The kernels cannot be compiled to count, or the resulting program cannot run."""


def _machine_of(compiler: Sequence[str]) -> str:
    """Returns the compiler's target machine, a key of `MACHINES`.

    Raises:
        CountingError: the target is not in `MACHINES`.
    """
    triple = _run([*compiler, "-dumpmachine"]).strip()
    name = triple.partition("-")[0]
    if name not in MACHINES:
        raise CountingError(f"scalar instructions are counted in code for {' or '.join(MACHINES)}; this is {triple}")
    return name


class ScalarUnits:
    """The kernels of every operator, compiled to count instructions."""

    def __init__(self, folder: Path, compiler: str | None = None, run: str = "", every: bool = True) -> None:
        """Compiles the program, unless it exists.

        Args:
            folder: existing folder for batches.
            compiler: a C++ compiler and its options, by default `$CXX` or `c++`.
            run: a program that runs code compiled for another machine, such as `qemu-aarch64`.
            every: whether to compile each operator with every dtype, and updates for every form of a record.

        Raises:
            CountingError: compiling fails, the target is not in `MACHINES`, or the program `run` does not exist.
        """
        command = shlex.split(compiler or os.environ.get("CXX", "c++"))
        self.machine = _machine_of(command)
        machine = MACHINES[self.machine]
        runner = shlex.split(run)
        if runner and shutil.which(runner[0]) is None:
            raise CountingError(f"--run: {runner[0]} is no program that can run")
        self._folder = folder
        version = _run([*command, "--version"])
        flags = [*_FLAGS, *machine.flags, f"-I{_SOURCES}", f"-I{ROOT}"]
        flags += ["-DREC_SDK_EVERY"] if every else []
        if self.machine == "x86_64" and "clang" not in version:
            flags.append(_GCC_ON_X86)
        linked = ["-static"] if run else []
        self._program = [*runner, str(_compiled(command, flags, linked, machine, version))]

    def count(self, slots: npt.NDArray[np.int64], rows: int, dim: int, cores: int = 48) -> Counts:
        """Counts every operator on one batch: `slots` `[N]`, each in `[0, rows)`."""
        path = self._folder / "slots"
        path.write_bytes(slots.astype(np.int32).tobytes())
        numbers = [str(number) for number in (rows, dim, cores)]
        counts: Counts = json.loads(_run([*self._program, str(path), *numbers]))
        return counts


def _compiled(
    command: Sequence[str], flags: Sequence[str], linked: Sequence[str], machine: Machine, version: str
) -> Path:
    """Returns the path of the program that counts the kernels' instructions, building it if it does not exist."""
    kernels, hardware = _SOURCES / "kernels.cpp", _SOURCES / "hardware.cpp"
    sources = "".join(_run([*command, *flags, "-E", "-P", str(source)]) for source in (kernels, hardware))
    sources += Path(__file__).read_text()
    made_by = shlex.join([*command, *flags, *linked]) + version
    program = _PROGRAMS / hashlib.sha256((made_by + sources).encode()).hexdigest()[:32]
    if program.exists():
        return program
    _PROGRAMS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_PROGRAMS) as folder:
        text, counted, made = (Path(folder) / name for name in ("kernels.s", "counted.s", "scalar_unit"))
        _run([*command, *flags, "-S", str(kernels), "-o", str(text)])
        counted.write_text(with_counters(text.read_text(), machine))
        _run([*command, "-std=c++17", "-O2", *linked, str(counted), str(hardware), "-o", str(made)])
        made.replace(program)  # atomic, because other processes may build it at the same time
    return program


def _run(command: Sequence[str]) -> str:
    """Runs a command; returns its output.

    Raises:
        CountingError: the command fails.
    """
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except OSError as error:
        raise CountingError(f"{shlex.join(command)} cannot run: {error}") from None
    if done.returncode != 0:
        raise CountingError(f"{shlex.join(command)} failed:\n{done.stderr}")
    return done.stdout


OPTIONS = {
    "compiler": Option(None, "a C++ compiler for x86-64 or 64-bit Arm, with its options; else $CXX or c++", kind=str),
    "run": Option("", "runs what the compiler makes for another machine: qemu-aarch64"),
    "every": Option(True, "each operator with every data type, and every form of a record", quick=False),
}
"""The arguments of `ScalarUnits`."""


class Budget(NamedTuple):
    """Instructions of one core for one additional lookup or row, without the fixed cost of a launch."""

    lookup: float
    """`lookup_sequence`, fp32."""
    pooled: float
    """`lookup_pooled`, fp32, in bags of 8."""
    moved_row: float
    """`gather_rows`."""
    swapped_row: float
    """`swap_rows`, of a cache that is full."""
    row: float
    """`update_rows`, Adam, of a row with one lookup."""
    further: float
    """The cost of its second lookup."""
    many: float
    """The cost of each further lookup in a row of 32."""


def budget(units: ScalarUnits, dim: int = 128, cores: int = 8) -> Budget:
    """Computes the cost of one additional lookup or row from two batches of different size."""
    few, many = 1024, 3072

    def of_row(lookups: int) -> dict[str, float]:
        """Returns the instructions of each operator for one additional row with `lookups` lookups."""
        of_sizes = []
        for rows in (few // lookups, many // lookups):
            slots = np.random.default_rng(0).permutation(np.repeat(np.arange(rows), lookups))
            of_sizes.append(units.count(slots, rows, dim, cores))
        less, more = ({name: sum(each[name.split()[0]]) for name, each in counts.items()} for counts in of_sizes)
        return {name: (more[name] - less[name]) * lookups / (many - few) for name in more}

    each, second, last = of_row(1), of_row(2), of_row(32)
    row = each["update_rows adam"]
    return Budget(
        each["lookup_sequence float32"],
        each["lookup_pooled float32"],
        each["gather_rows"],
        each["swap_rows"],
        row,
        second["update_rows adam"] - row,
        (last["update_rows adam"] - row) / 31,
    )


@benchmark(
    {"rows": Option(100_000, quick=1000), "lookups": Option(65_536, "uniform", quick=1000), **OPTIONS},
    threads=None,
    malloc=False,
)
def npu_scalar(options: argparse.Namespace) -> Iterator[Row]:
    """Counts the scalar instructions of an additional lookup or row, and of each operator's busiest core.

    The counts of the busiest core are for one batch of uniform lookups.

    Raises:
        CountingError: the kernels cannot be compiled to count, or the resulting program cannot run.
    """
    with tempfile.TemporaryDirectory() as folder:
        units = ScalarUnits(Path(folder), options.compiler, options.run, options.every)
        table = f"scalar instructions, counted in code for {units.machine}, D = 128"
        for name, value in budget(units)._asdict().items():
            yield {"table": table, "one more": name, "instructions": value}
        slots = Distribution.parse("uniform").draw(np.random.default_rng(0), options.rows, options.lookups)
        for operator, kernels in units.count(slots, options.rows, 128).items():
            for kernel, cores in kernels.items():
                yield {"table": "busiest of 48 cores", "operator": operator, "kernel": kernel, "scalar": max(cores)}
