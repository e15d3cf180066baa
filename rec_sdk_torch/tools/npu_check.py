"""Runs every operator on an NPU, compares the bits of its results with the CPU's, and measures its time.

    python -m rec_sdk_torch.npu_check

Run this command first on a new chip, and attach its report to questions. Each line is begun before its operator runs,
so that the last line names the operator if it hangs. At the end, another process launches a kernel that must fail, and
the report states whether an error was raised. The exit status is 0 if all bits are equal and the error was raised. It
is 1 if not, or if an operator failed, and 2 without an NPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ..runtime.command import BAD_USE, CommandParser, complain
from ..runtime.lazy import torch_npu_problem

_PROGRAM = "python -m rec_sdk_torch.npu_check"
_EXAMPLE = f"""
{_PROGRAM} > report.txt
{_PROGRAM} --device npu:1 --dim 64
python -m rec_sdk_torch.emulate -m rec_sdk_torch.npu_check --rows 1000 --lookups 1024 --repeats 1 --copy-mib 1
"""


def _parser() -> CommandParser:
    parser = CommandParser(prog=_PROGRAM, description=__doc__, example=_EXAMPLE)
    parser.add_argument("--device", default="npu", help="the NPU to check, such as npu:1 (default: the current one)")
    parser.add_argument("--rows", type=int, default=100_000, help="rows of the table (default: %(default)s)")
    parser.add_argument("--lookups", type=int, default=65_536, help="lookups of the batch (default: %(default)s)")
    parser.add_argument("--dim", type=int, default=128, help="elements of a row (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of each operator (default: %(default)s)")
    # Used internally: starts the process that makes the failing launch.
    parser.add_argument("--fail-a-launch", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--copy-mib", type=int, default=256, help="size of the timed copy (default: %(default)s)")
    return parser


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(arguments)
    for name in ("rows", "lookups", "dim", "repeats", "copy_mib"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}, it must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks the operators and returns the exit status."""
    options = _parse(arguments)  # parsed before torch is imported, because that import may fail
    try:
        from ..operators.devices.backends import parse_device
        from . import npu_report
        from .operator_cases import BAG
    except (ImportError, RuntimeError) as error:
        reason = torch_npu_problem(error)
        if reason is None:
            raise
        complain(_PROGRAM, reason)
        return BAD_USE
    if options.lookups < BAG:
        _parser().error(f"--lookups is {options.lookups}, it must be at least {BAG}")
    try:
        device = parse_device(options.device)
    except (ImportError, ValueError, RuntimeError) as error:
        complain(_PROGRAM, f"there is no NPU to check. {error}")
        return BAD_USE
    if device.type != "npu":
        complain(_PROGRAM, f"{options.device!r} is no NPU; --device takes npu or npu:INDEX")
        return BAD_USE
    if options.fail_a_launch:
        return npu_report.fail_a_launch(device)
    return npu_report.Report(device, options).run()
