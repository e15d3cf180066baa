"""`python -m rec_sdk_torch` lists the commands of the package; `python -m rec_sdk_torch COMMAND` runs one."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence

from . import __version__
from .runtime.command import BAD_USE, complain

PROGRAM = "python -m rec_sdk_torch"

COMMANDS = {
    "cache_advice": "recommends a cache size and a cache policy from the ids of a run",
    "checkpoint": "shows, verifies, exports and quantizes saves",
    "compat": "runs a script that was written for Rec SDK or dynamicemb",
    "doctor": "reports what works on this machine, and trains a small table on each device; for bug reports",
    "emulate": "runs a program that uses torch_npu on an emulated NPU",
    "npu_check": "compares every operator on an NPU with the CPU, bit by bit, and times it",
}
"""The modules of the package that are commands, with a description for the help."""


def usage() -> str:
    """Returns the help text: the list of commands."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            f"rec_sdk_torch {__version__}: embedding tables larger than device memory.",
            "",
            f"usage: {PROGRAM} COMMAND [arguments], or {PROGRAM}.COMMAND [arguments]",
            "",
            *lines,
            "",
            f"{PROGRAM}.COMMAND --help explains a command, with an example.",
            f"Something does not work? {PROGRAM}.doctor",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Lists the commands, or runs one as `python -m rec_sdk_torch.<command>` does."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0
    if words[0] == "--version":
        print(__version__)
        return 0
    if words[0] not in COMMANDS:
        complain(PROGRAM, f"no command {words[0]!r}, only {', '.join(COMMANDS)}")
        return BAD_USE
    sys.argv = words
    runpy.run_module(f"rec_sdk_torch.{words[0]}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
