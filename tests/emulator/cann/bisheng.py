#!/usr/bin/env python3
"""A stand-in for bisheng: it records its arguments, and type-checks the source with g++.

g++ sees the emulator's AscendC and the ACL headers of REC_SDK_ACL_HEADERS, and each kernel<<<...>>>(...) as a call.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def main(arguments: list[str]) -> int:
    with open(os.environ["REC_SDK_BISHENG_LOG"], "a") as log:
        print(*arguments, file=log)
    output = Path(arguments[arguments.index("-o") + 1])
    output.write_bytes(b"")
    if "-c" not in arguments:
        return 0
    source = Path(arguments[arguments.index("-c") + 1])
    plain = output.with_suffix(".cpp")
    plain.write_text(re.sub(r"<<<.*?>>>", "", source.read_text(), flags=re.DOTALL))
    includes = [ROOT, ROOT / "emulator/ascendc", os.environ["REC_SDK_ACL_HEADERS"]]
    check = ["g++", "-std=c++17", "-fsyntax-only", "-DREC_SDK_ASCENDC_ARCH=2201", *(f"-I{path}" for path in includes)]
    return subprocess.run([*check, str(plain)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
