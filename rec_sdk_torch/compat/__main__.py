"""`python -m rec_sdk_torch.compat script.py args...`, or `-m module args...`: runs it with Rec SDK's names."""

from __future__ import annotations

import os
import runpy
import sys

_USAGE = "usage: python -m rec_sdk_torch.compat [-m module | script.py] [arguments]"


def main() -> int:
    """Runs what `sys.argv` names as `__main__`; it sees its own arguments only."""
    arguments = sys.argv[1:]
    as_module = arguments[:1] == ["-m"]
    program = arguments[as_module:]
    if not program or program[0].startswith("-"):
        print(_USAGE, file=sys.stderr)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    import rec_sdk_torch.compat  # noqa: F401  # it is imported by now, unless this file is run by its path

    sys.argv = program
    if as_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        return 0
    if not os.path.isfile(program[0]):
        print(f"rec_sdk_torch.compat: there is no script {program[0]!r}; {_USAGE}", file=sys.stderr)
        return 2
    sys.path[0] = os.path.dirname(os.path.abspath(program[0]))  # as python script.py has it
    runpy.run_path(program[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
