"""Builds the report of `npu_check`. This is a separate module because it imports torch, which may fail."""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from .. import __version__, emulate
from .operator_cases import Batch, Case, all_cases

FAILING = "a launch on no cores, which must fail"

_SECONDS = 300
"""Seconds after which the process with the failing launch is killed."""
_ERROR_SECONDS = 5
"""Seconds within which a failed launch must raise an error."""


def _difference(ours: torch.Tensor, reference: torch.Tensor) -> str:
    """Describes how two tensors differ; "" if all bits are equal.

    Differences are between the bits read as integers; for floats these are units in the last place.
    """
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
        {name: result.cpu() for name, result in case.to(each).results().items()} for each in ("cpu", device)
    )
    each = ((name, _difference(found[name], expected[name])) for name in expected)
    return "; ".join(f"{name}: {difference}" for name, difference in each if difference)


def _seconds(device: torch.device, call: Callable[[], object], repeats: int) -> float:
    """Returns the mean seconds per call, from `repeats` calls that are queued without waiting for each result."""
    synchronize = torch.get_device_module(device).synchronize
    call()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def fail_a_launch(device: torch.device) -> int:
    """Launches a kernel on zero cores and waits. Prints the error and returns 0, or returns 1 if none is raised.

    It waits repeatedly: torch_npu empties its queue before it stores the error, so a single wait can return in between.
    """
    on = torch.zeros(1, device=device)
    end = time.monotonic() + _ERROR_SECONDS
    try:
        torch.ops.rec_sdk_npu.launch_on_no_cores(on)
        while time.monotonic() < end:
            torch.get_device_module(device).synchronize(device)
            time.sleep(0.01)
    except RuntimeError as error:
        print(error)
        return 0
    print("no call raised an error")
    return 1


class Report:
    """Report on one NPU: runs the operators and prints a line for each.

    Attributes:
        device: the NPU.
        options: arguments of the command.
        failed: names of the operators whose bits differ.
    """

    def __init__(self, device: torch.device, options: argparse.Namespace) -> None:
        self.device = device
        self.options = options
        self.failed: list[str] = []

    def _copy_bandwidth(self) -> float:
        """Measures the bandwidth of a copy within device memory, in bytes read plus bytes written per second."""
        size: int = self.options.copy_mib << 20
        source = torch.zeros(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * size / _seconds(self.device, lambda: target.copy_(source), self.options.repeats)

    def print_header(self) -> float:
        """Prints versions, the device and the copy bandwidth, and returns that bandwidth in bytes per second."""
        import torch_npu
        from torch_npu.npu.utils import get_cann_version

        name = torch.npu.get_device_name(self.device)  # type: ignore[attr-defined]
        print(f"rec_sdk_torch {__version__}, torch {torch.__version__}, torch_npu {torch_npu.__version__}, ", end="")
        cann = get_cann_version() or "of unknown version"
        print(f"CANN {cann}, Python {platform.python_version()}, {platform.machine()}")
        if emulate.active():
            print(f"{self.device}: EMULATED (torch is told {name}). Bits are meaningful, times are not.")
        else:
            print(f"{self.device}: {name}")
        bandwidth = self._copy_bandwidth()
        print(f"copy bandwidth {bandwidth / 1e9:.1f} GB/s; 'byte time': an operator's least bytes at this bandwidth")
        print(f"{self.options.rows} rows, {self.options.lookups} lookups, D = {self.options.dim}", flush=True)
        return bandwidth

    def run_case(self, case: Case, bandwidth: float) -> None:
        """Runs one operator and prints whether its bits equal the CPU's, its time, and its multiple of byte time."""
        print(f"{case.name:<50}", end="", flush=True)
        differences = _differences(case, self.device)
        seconds = _seconds(self.device, case.to(self.device).call, self.options.repeats)
        byte_time = case.least_bytes / bandwidth
        times = f"{1e6 * seconds:>10.1f} us{seconds / byte_time:>8.2f} x byte time"
        print(f"{'DIFFERS' if differences else 'same bits':<10}{times}", flush=True)
        if differences:
            self.failed.append(case.name)
            print(f"    {differences}", flush=True)

    def check_failing_launch(self) -> bool:
        """Launches, in another process, a kernel that must fail; prints and returns whether it raised an error.

        A separate process is used because torch_npu's queue runs nothing after a failure.
        """
        print(f"{FAILING:<50}", end="", flush=True)
        command = [sys.executable, "-m", "rec_sdk_torch.npu_check", "--device", str(self.device), "--fail-a-launch"]
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"HANGS: a process that makes one does not end within {_SECONDS} s")
            return False
        if done.returncode != 0:
            print(f"NOT SEEN: the process ends with status {done.returncode}")
        else:
            print("seen")
        output = [line for line in (done.stdout or done.stderr).splitlines() if line.strip()]
        print(*(f"    {line}" for line in output[:6]), sep="\n", flush=True)  # torch_npu repeats its errors
        return done.returncode == 0

    def run(self) -> int:
        """Prints the report and returns the exit status."""
        bandwidth = self.print_header()
        for case in all_cases(Batch.random(self.options.rows, self.options.lookups), self.options.dim):
            try:
                self.run_case(case, bandwidth)
            except RuntimeError as error:  # after a failure, torch_npu's queue runs nothing
                print(f"FAILED\n{error}\nNot run: the operators after {case.name}.")
                return 1
        seen = self.check_failing_launch()
        if self.failed:
            print(f"Bits differ: {', '.join(self.failed)}.")
        else:
            print("All bits are the CPU's.")
        if not seen:
            print("A launch that fails raises no error here: results may be wrong without one; CANN's log has it.")
        return 0 if seen and not self.failed else 1
