"""The report of `npu_check`, which imports this only where torch can be imported."""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from .. import __version__, emulate
from .operator_cases import Batch, Case, cases

FAILING = "a launch on no cores, which must fail"

_SECONDS = 300
"""A process whose launch fails is killed after so many seconds."""
_ERROR_SECONDS = 5
"""A launch that failed must have raised an error after so many seconds."""


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
        {name: result.cpu() for name, result in case.to(each).results().items()} for each in ("cpu", device)
    )
    each = ((name, _difference(found[name], expected[name])) for name in expected)
    return "; ".join(f"{name}: {difference}" for name, difference in each if difference)


def _seconds(device: torch.device, call: Callable[[], object], repeats: int) -> float:
    """Seconds of one call, in a queue of them."""
    synchronize = torch.get_device_module(device).synchronize
    call()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def fail_a_launch(device: torch.device) -> int:
    """Launches on no cores and waits; prints what error that raises, and returns 0, or 1 if there is none.

    torch_npu empties its queue before it keeps the error, so a call in between finds nothing to wait for and no error.
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


class Check:
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
        from torch_npu.npu.utils import get_cann_version

        name = torch.npu.get_device_name(self.device)  # type: ignore[attr-defined]
        print(f"rec_sdk_torch {__version__}, torch {torch.__version__}, torch_npu {torch_npu.__version__}, ", end="")
        cann = get_cann_version() or "of unknown version"
        print(f"CANN {cann}, Python {platform.python_version()}, {platform.machine()}")
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
        seconds = _seconds(self.device, case.to(self.device).call, self.options.repeats)
        byte_time = case.least_bytes / bandwidth
        times = f"{1e6 * seconds:>10.1f} us{seconds / byte_time:>8.2f} x byte time"
        print(f"{'DIFFERS' if differences else 'same bits':<10}{times}", flush=True)
        if differences:
            self.failed.append(case.name)
            print(f"    {differences}", flush=True)

    def failing_launch(self) -> bool:
        """Prints whether this machine tells of a launch that fails; in a process of its own, whose queue ends so."""
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
        print(*(f"    {line}" for line in output[:6]), sep="\n", flush=True)  # an error of torch_npu repeats itself
        return done.returncode == 0

    def run(self) -> int:
        """Prints the report; the exit status."""
        bandwidth = self.header()
        for case in cases(Batch.random(self.options.rows, self.options.lookups), self.options.dim):
            try:
                self.case(case, bandwidth)
            except RuntimeError as error:  # after one, torch_npu's queue runs nothing any more
                print(f"FAILED\n{error}\nNot run: what follows {case.name}.")
                return 1
        seen = self.failing_launch()
        if self.failed:
            print(f"Bits differ: {', '.join(self.failed)}.")
        else:
            print("All bits are the CPU's.")
        if not seen:
            print("A launch that fails raises no error here: results may be wrong without one; CANN's log has it.")
        return 0 if seen and not self.failed else 1
