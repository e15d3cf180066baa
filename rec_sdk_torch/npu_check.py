"""Runs every operator on an NPU and on the CPU, compares the bits, and times them. Run it first on a new chip.

    python -m rec_sdk_torch.npu_check

Prints a report to send along with a question. Each line appears before its operator runs, so that the last one
names what hangs. The exit status is 0 when all bits are equal, 1 when not or when an operator failed, 2 without an NPU.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable, Sequence

import torch

from . import __version__, emulate
from .backends.devices import parse_device
from .operator_cases import BAG, Batch, Case, cases

__all__ = ["main"]


def _difference(ours: torch.Tensor, reference: torch.Tensor) -> str:
    """Says what differs, "" if no bit does. Distances are of integers, for floats units in the last place."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[reference.itemsize]
    a, b = (tensor.contiguous().view(words).long() for tensor in (ours, reference))
    wrong = a != b
    if not wrong.any():
        return ""
    first = wrong.nonzero()[0].tolist()
    values = f"{ours[tuple(first)].item()!r}, on the CPU {reference[tuple(first)].item()!r}"
    count, most = int(wrong.sum()), int((a - b).abs().max())
    return (
        f"{count} of {wrong.numel()} values differ, by up to {most} in the last place; the first at {first}: {values}"
    )


def _differences(case: Case, device: torch.device) -> str:
    expected, found = (
        {name: result.cpu() for name, result in case.on(each).results().items()} for each in ("cpu", device)
    )
    each = ((name, _difference(found[name], expected[name])) for name in expected)
    return "; ".join(f"{name}: {difference}" for name, difference in each if difference)


def _seconds(device: torch.device, call: Callable[[], object], repeats: int) -> float:
    """Seconds of one call, in a queue of them."""
    synchronize = torch.npu.synchronize  # type: ignore[attr-defined]
    call()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


class _Check:
    """One report."""

    def __init__(self, device: torch.device, options: argparse.Namespace) -> None:
        self.device = device
        self.options = options
        self.failed: list[str] = []

    def _copy_bandwidth(self) -> float:
        """Bytes per second, read and written."""
        size: int = self.options.copy_mib << 20
        source = torch.zeros(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * size / _seconds(self.device, lambda: target.copy_(source), self.options.repeats)

    def header(self) -> float:
        """Prints what it runs on; the copy bandwidth."""
        import torch_npu

        name = torch.npu.get_device_name(self.device)  # type: ignore[attr-defined]
        print(f"rec_sdk_torch {__version__}, torch {torch.__version__}, torch_npu {torch_npu.__version__}, ", end="")
        print(f"Python {platform.python_version()}, {platform.machine()}")
        if emulate.active():
            print(f"{self.device}: EMULATED (torch is told {name}). Bits mean something, times do not.")
        else:
            print(f"{self.device}: {name}")
        bandwidth = self._copy_bandwidth()
        print(f"copy bandwidth {bandwidth / 1e9:.1f} GB/s; 'byte time' is what an operator's least bytes take at it")
        print(f"{self.options.rows} rows, {self.options.lookups} lookups, D = {self.options.dim}", flush=True)
        return bandwidth

    def case(self, case: Case, bandwidth: float) -> None:
        """Prints one line."""
        print(f"{case.name:<50}", end="", flush=True)
        differences = _differences(case, self.device)
        seconds = _seconds(self.device, case.on(self.device).call, self.options.repeats)
        byte_time = case.least_bytes / bandwidth
        times = f"{1e6 * seconds:>10.1f} us{seconds / byte_time:>8.2f} x byte time"
        print(f"{'DIFFERS' if differences else 'same bits':<10}{times}", flush=True)
        if differences:
            self.failed.append(case.name)
            print(f"    {differences}", flush=True)

    def run(self) -> int:
        """Prints the report; the exit status."""
        bandwidth = self.header()
        for case in cases(Batch.draw(self.options.rows, self.options.lookups), self.options.dim):
            try:
                self.case(case, bandwidth)
            except RuntimeError as error:  # after one, torch_npu's queue runs nothing any more
                print(f"FAILED\n{error}\nNot run: what follows {case.name}.")
                return 1
        if self.failed:
            print(f"Bits differ: {', '.join(self.failed)}.")
            return 1
        print("All bits are the CPU's.")
        return 0


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
    parser.add_argument("--copy-mib", type=int, default=256, help="size of the timed copy (default: %(default)s)")
    options = parser.parse_args(arguments)
    for name in ("rows", "lookups", "dim", "repeats", "copy_mib"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}, it must be at least 1")
    if options.lookups < BAG:
        parser.error(f"--lookups is {options.lookups}, it must be at least {BAG}")
    return options


def main(arguments: Sequence[str]) -> int:
    """Checks the operators; the exit status."""
    options = _parse(arguments)
    try:
        device = parse_device(options.device)
    except (ImportError, ValueError, RuntimeError) as error:
        print(f"npu_check: there is no NPU to check. {error}", file=sys.stderr)
        return 2
    if device.type != "npu":
        print(f"npu_check: {options.device!r} is no NPU; --device takes npu or npu:INDEX", file=sys.stderr)
        return 2
    return _Check(device, options).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
