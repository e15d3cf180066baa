"""The libraries run on any x86-64 processor: newer instructions occur only in kernels chosen at run time."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rec_sdk_torch.operators.schemas import cpu_isa

PACKAGE = Path(__file__).resolve().parents[1] / "rec_sdk_torch"
FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
INSTRUCTION = re.compile(r"^\s+[0-9a-f]+:\s+(\w+)\s*(.*)$")
NEWER = re.compile(r"v[a-z]\w+|andn|bextr|bls[irmsk]+|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx|movbe|lzcnt|popcnt")
"""Instructions behind the first x86-64: AVX and later begin with v; the others came with x86-64-v2 and v3.

Not tzcnt: compilers write `rep bsf` for it where zero cannot come, and older processors run that as bsf.
"""
OLD = {"verr", "verw", "vmcall"}

pytestmark = [
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="about x86-64"),
    pytest.mark.skipif(shutil.which("objdump") is None, reason="there is no objdump"),
]


def newer(library: Path) -> dict[str, set[str]]:
    """Returns the newer instructions in each function that contains any."""
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", str(library)]
    found: dict[str, set[str]] = {}
    function = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if named := FUNCTION.match(line):
                function = named[1]
            elif (shown := INSTRUCTION.match(line)) and NEWER.fullmatch(shown[1]) and shown[1] not in OLD:
                found.setdefault(function, set()).add(shown[1])
    assert process.returncode == 0
    return found


def test_kernels_of_newer_processors_are_apart() -> None:
    found = newer(PACKAGE / "_ops.so")
    if not any("x86_64_v3" in function for function in found):
        pytest.skip(f"a build for {cpu_isa()} alone")
    assert any("vfm" in each or "vmul" in each or "vadd" in each for names in found.values() for each in names)
    assert {name: used for name, used in found.items() if not re.search(r"::x86_64_v[34]::|x86_64_v[34]", name)} == {}


def test_the_engine_needs_no_newer_instruction_set() -> None:
    """Only the variants of the initial weights that are chosen at run time have newer instructions."""
    (library,) = PACKAGE.glob("_engine.*.so")
    assert {name for name in newer(library) if not re.search(r"::x86_64_v[34]::", name)} == set()
