"""Runs every operator on an NPU and on the CPU, compares the bits, and times them. Run it first on a new chip.

    python -m rec_sdk_torch.npu_check

Prints a report to send along with a question. Each line appears before its operator runs, so that the last one
names what hangs. At the end a process makes a launch that must fail, and the report says whether its error was seen.
The exit status is 0 when all bits are equal and that error was seen, 1 when not or when an operator failed, 2 without
an NPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ._lazy import torch_npu_problem

__all__ = ["main"]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rec_sdk_torch.npu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="npu", help="default: the current NPU")
    parser.add_argument("--rows", type=int, default=100_000, help="rows of the table (default: %(default)s)")
    parser.add_argument("--lookups", type=int, default=65_536, help="lookups of the batch (default: %(default)s)")
    parser.add_argument("--dim", type=int, default=128, help="elements of a row (default: %(default)s)")
    parser.add_argument(
        "--repeats", type=int, default=20, help="calls that a time is the mean of (default: %(default)s)"
    )
    # For the process of the report's last line.
    parser.add_argument("--fail-a-launch", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--copy-mib", type=int, default=256, help="size of the timed copy (default: %(default)s)")
    options = parser.parse_args(arguments)
    for name in ("rows", "lookups", "dim", "repeats", "copy_mib"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}, it must be at least 1")
    from .operator_cases import BAG  # which imports torch

    if options.lookups < BAG:
        parser.error(f"--lookups is {options.lookups}, it must be at least {BAG}")
    return options


def main(arguments: Sequence[str]) -> int:
    """Checks the operators; the exit status."""
    try:
        from . import npu_report
        from .backends.devices import parse_device
    except (ImportError, RuntimeError) as error:
        reason = torch_npu_problem(error)
        if reason is None:
            raise
        print(f"npu_check: {reason}", file=sys.stderr)
        return 2
    options = _parse(arguments)
    try:
        device = parse_device(options.device)
    except (ImportError, ValueError, RuntimeError) as error:
        print(f"npu_check: there is no NPU to check. {error}", file=sys.stderr)
        return 2
    if device.type != "npu":
        print(f"npu_check: {options.device!r} is no NPU; --device takes npu or npu:INDEX", file=sys.stderr)
        return 2
    if options.fail_a_launch:
        return npu_report.fail_a_launch(device)
    return npu_report.Check(device, options).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
