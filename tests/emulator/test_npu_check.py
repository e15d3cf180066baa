"""rec_sdk_torch.npu_check on the EMULATED NPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import ClassVar

import forked_python
import pytest
import torch

from rec_sdk_torch import npu_check
from rec_sdk_torch.formulas import FORMULAS
from rec_sdk_torch.tools import npu_report
from rec_sdk_torch.tools.operator_cases import Batch, Case, Tensors, all_cases

SMALL = ["--rows", "2000", "--lookups", "6000", "--dim", "20", "--repeats", "1", "--copy-mib", "1"]


def test_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert npu_check.main(SMALL) == 0
    report = capsys.readouterr().out
    assert "EMULATED" in report
    assert "times are not" in report
    lines = [line for line in report.splitlines() if "x byte time" in line]
    copies, lookups_of_each_type, updates_of_each_type = 3, 5, len(FORMULAS)
    assert len(lines) == copies + 3 * (lookups_of_each_type + updates_of_each_type) + 1
    assert [line for line in lines if "same bits" not in line] == []
    assert f"{npu_report.FAILING:<50}seen\n" in report
    assert "kernel 'nothing' was not launched: it asks for 0 cores" in report
    assert "CANN " in report
    assert report.endswith("All bits are the CPU's.\n")


class WrongCase(Case):
    """A case whose results on an NPU differ from the expected results."""

    wrong: ClassVar[Callable[[Tensors], Tensors]]

    def results(self) -> Tensors:
        right = super().results()
        return type(self).wrong(right) if self.arguments["cache"].device.type == "npu" else right


def plant(monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Tensors], Tensors]) -> None:
    """Restricts the check to gather_rows, with wrong results, and two other operators."""

    class Planted(WrongCase):
        pass

    Planted.wrong = wrong

    def planted(batch: Batch, dim: int) -> Iterator[Case]:
        for case in all_cases(batch, dim):
            if case.name == "gather_rows":
                yield Planted(case.name, case.arguments, case.least_bytes)
            elif case.name in ("scatter_rows", "lookup_sequence float32"):
                yield case

    monkeypatch.setattr(npu_report, "all_cases", planted)


def test_one_wrong_bit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(results: Tensors) -> Tensors:
        rows = results["result"].cpu()
        rows[3, 5] ^= 1
        return {"result": rows.to("npu")}

    plant(monkeypatch, wrong)
    assert npu_check.main(SMALL) == 1
    report = capsys.readouterr().out
    assert f"{'gather_rows':<50}DIFFERS" in report
    assert "result: 1 of " in report
    assert "by up to 1 in the last place; the first at [3, 5]" in report
    assert f"{'lookup_sequence float32':<50}same bits" in report  # the other operators are still checked
    assert report.endswith("Bits differ: gather_rows.\n")


def test_an_operator_that_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(results: Tensors) -> Tensors:
        raise RuntimeError("507000")

    plant(monkeypatch, wrong)
    assert npu_check.main(SMALL) == 1
    report = capsys.readouterr().out
    assert f"{'gather_rows':<50}FAILED\n507000\nNot run: the operators after gather_rows." in report
    assert "scatter_rows" not in report


@pytest.mark.parametrize("status", [1, -11])
def test_an_undetected_failure_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    """The runtime only prints the failure, as CANN 8.5 may do, or the process dies."""
    plant(monkeypatch, lambda results: results)

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, status, "no call raised an error\n", "")

    monkeypatch.setattr(npu_report.subprocess, "run", run)
    assert npu_check.main(SMALL) == 1
    report = capsys.readouterr().out
    assert f"{npu_report.FAILING:<50}NOT SEEN: the process ends with status {status}\n" in report
    assert "All bits are the CPU's.\nA launch that fails raises no error here" in report


@pytest.mark.parametrize("queue", ["0", "1"], ids=["at once", "task queue"])
def test_a_failing_launch_is_reported(queue: str) -> None:
    done = forked_python.python("-m", "rec_sdk_torch.npu_check", "--fail-a-launch", TASK_QUEUE_ENABLE=queue)
    assert done.returncode == 0, done.stderr
    assert "rec_sdk_launch_on_no_cores" in done.stdout


def test_an_error_that_the_first_synchronize_misses() -> None:
    """torch_npu's queue is empty shortly before it stores the error, so the first synchronize may miss it."""
    script = """
import torch, torch_npu
from rec_sdk_torch import npu_check
later, calls = torch.npu.synchronize, []
torch.npu.synchronize = lambda device: calls.append(0) or (later(device) if len(calls) > 1 else None)
raise SystemExit(npu_check.main(["--fail-a-launch"]))
"""
    done = forked_python.python("-c", script)
    assert done.returncode == 0, done.stderr
    assert "rec_sdk_launch_on_no_cores" in done.stdout


def test_missing_cann_is_reported_in_one_line() -> None:
    """The check runs in a new process that has torch_npu but neither CANN nor the launcher."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LD_", "REC_SDK_", "TORCH_DEVICE_"))}
    command = [sys.executable, "-m", "rec_sdk_torch.npu_check"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "python -m rec_sdk_torch.npu_check: torch cannot be imported, since torch_npu is installed and "
    )
    assert "python -m rec_sdk_torch.emulate" in line


def test_distances_of_floats() -> None:
    one = torch.tensor([1.0, 2.0])
    near = one.view(torch.int32).add(torch.tensor([0, -3], dtype=torch.int32)).view(torch.float32)
    assert npu_report._difference(one, one) == ""
    assert "1 of 2 values differ, by up to 3 in the last place; the first at [1]" in npu_report._difference(near, one)


def test_a_missing_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert npu_check.main(["--device", "npu:7"]) == 2
    assert "there are 2 NPUs" in capsys.readouterr().err
