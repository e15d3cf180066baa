"""Runs an unchanged script that was written for Rec SDK or dynamicemb, whose modules this package then provides.

The modules `torchrec_embcache`, `hybrid_torchrec` and `dynamicemb` use cached tables on CPU, CUDA and NPU.
`sys.argv` contains only the script's own arguments, and `__name__` is "__main__". docs/porting.md lists what is
supported.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence

from ..runtime.command import BAD_USE, CommandParser, complain

_PROGRAM = "python -m rec_sdk_torch.compat"
_EXAMPLE = f"""
{_PROGRAM} train.py --epochs 3
{_PROGRAM} -m my_package.train
torchrun --nproc-per-node 2 -m rec_sdk_torch.compat train.py
"""


def _parser() -> CommandParser:
    parser = CommandParser(
        prog=_PROGRAM, description=__doc__, usage=f"{_PROGRAM} (script.py | -m module) [arguments]", example=_EXAMPLE
    )
    parser.add_argument("program", help="path of a script; or -m and a module name, as in python -m")
    parser.add_argument("arguments", nargs="*", help="arguments of the script")
    return parser


def _find_problem(module: str) -> str:
    """Returns why a module cannot be run; "" if nothing is known to prevent it."""
    if not all(part.isidentifier() for part in module.split(".")):
        return f"{module!r} is no name of a module"
    try:
        module_spec = importlib.util.find_spec(module)
        package = module_spec is not None and module_spec.submodule_search_locations is not None
        if package and importlib.util.find_spec(f"{module}.__main__") is None:
            return f"{module!r} is a package without __main__"
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the package exists, but one of its own imports failed
        return str(error)
    except ValueError:  # find_spec raises it for __main__ itself
        return ""
    return f"No module named {module!r}" if module_spec is None else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a script or a module as `__main__`; if it does not exist, prints one line of error and returns 2."""
    command = list(sys.argv[1:] if arguments is None else arguments)
    as_module = command[:1] == ["-m"]
    program = command[as_module:]
    if command[:1] in (["-h"], ["--help"]):
        _parser().print_help()
        return 0
    if not program or program[0].startswith("-"):
        _parser().error(f"expected a script, or -m and the name of a module, got {' '.join(command) or 'nothing'!r}")
    import rec_sdk_torch.compat  # noqa: F401  # imported already, unless this file is run by its path

    if as_module:
        problem = _find_problem(program[0])
        if problem:
            complain(_PROGRAM, problem)
            return BAD_USE
        sys.argv = program
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        return 0
    if not os.path.isfile(program[0]):
        complain(_PROGRAM, f"there is no script {program[0]!r}; to run a module, put -m before it")
        return BAD_USE
    sys.argv = program
    sys.path[0] = os.path.dirname(os.path.abspath(program[0]))  # `python script.py` does the same
    runpy.run_path(program[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
