"""Every CUDA kernel compiles for A100 and H100 without a warning, if nvcc is installed; no GPU is needed.

Compiling for one architecture takes half as long, so only the full suite compiles for both.
"""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest
from cpp_units import NVCC, TESTS, Tree, build_cpp

ROOT = TESTS.parent
OPERATORS = sorted(folder.parent.name for folder in (ROOT / "op_kernels").glob("*/cpu.cpp"))
STRICT = "-DREC_SDK_CUDA_WERROR=ON"

pytestmark = pytest.mark.skipif(NVCC is None, reason="no nvcc in CUDA_HOME, on the path or in /usr/local/cuda")

PLANTED = {
    "": "__global__ void planted(int* to) { *to = 2; }",
    "unused_on_the_device": "__global__ void planted(int* to) { int unused_on_the_device = 1; *to = 2; }",
    "unused_on_the_host": "static int planted(int unused_on_the_host) { return 1; } int user() { return planted(1); }",
}


def machine_code(object_file: Path) -> set[int]:
    """Returns the architectures for which an object file has machine code, such as 80.

    The file's fat binaries are lists of entries. The header of an entry has these fields: 16 bits, 1 for PTX or 2 for
    machine code; 16 bits, version; 32 bits, size of the header in bytes; 64 bits, number of bytes that follow; 64 bits,
    unused here; 32 bits, minor and major version; 32 bits, architecture.
    """
    content = object_file.read_bytes()
    found: set[int] = set()
    at = content.find(struct.pack("<I", 0xBA55ED50))
    while at >= 0:
        header_bytes, size = struct.unpack_from("<HQ", content, at + 6)
        entry, end = at + header_bytes, at + header_bytes + size
        while entry < end:
            kind, entry_bytes, entry_size = struct.unpack_from("<H2xIQ", content, entry)
            if kind == 2:
                found.add(struct.unpack_from("<I", content, entry + 28)[0])
            entry += entry_bytes + entry_size
        at = content.find(struct.pack("<I", 0xBA55ED50), end)
    return found


@pytest.mark.parametrize(
    ("architectures", "expected"),
    [(["-DCMAKE_CUDA_ARCHITECTURES=90"], {90}), pytest.param([], {80, 90}, marks=pytest.mark.full)],
    ids=["H100", "both"],
)
def test_every_kernel_compiles(architectures: list[str], expected: set[int]) -> None:
    tree = Tree(f"nvcc-{len(expected)}", ROOT / "op_kernels" / "cuda", [STRICT, *architectures])
    tree.build()
    objects = {file.parent.name: file for file in tree.folder.glob("**/op_kernels/*/cuda.cu.o")}
    assert sorted(objects) == OPERATORS
    assert {name: machine_code(file) for name, file in objects.items()} == dict.fromkeys(OPERATORS, expected)


def test_warnings_are_errors(tmp_path: Path) -> None:
    planted = tmp_path / "op_kernels" / "planted" / "cuda.cu"
    planted.parent.mkdir(parents=True)
    project = shutil.copytree(ROOT / "op_kernels" / "cuda", tmp_path / "op_kernels" / "cuda")
    for warning, code in PLANTED.items():
        planted.write_text(f"#include <cuda_runtime.h>\n\n{code}\n")
        result = build_cpp(project, tmp_path / "build", STRICT)
        output = result.stdout + result.stderr
        assert (result.returncode == 0) == (not warning), output
        assert warning in output, output
