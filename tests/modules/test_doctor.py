"""`python -m rec_sdk_torch.doctor`: its self-test passes if tables can be trained, and otherwise reports the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rec_sdk_torch.tools.doctor import command as doctor
from rec_sdk_torch.tools.doctor import machine, self_test


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = doctor.main(arguments)
    return status, capsys.readouterr().out


def test_the_report_passes(device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = report(capsys, "--seconds", "0.01", "--device", str(device))
    assert status == 0, text
    parts = (
        "Python 3",
        "torch 2",
        "torchrec",
        "host memory",
        "transparent huge pages",
        "processors",
        "the host engine",
    )
    assert [part for part in parts if part not in text] == []
    assert f"works: {device}, " in text
    assert "self-test, 0.01 s: passed: 5 steps" in text
    assert text.splitlines()[-1] == f"works: {device}; does not: nothing"


def test_a_broken_device_is_reported_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = report(capsys, "--seconds", "0", "--device", "cuda:99")
    assert status == 1
    assert "does not work here: device 'cuda" in text
    assert text.splitlines()[-1] == "works: nothing; does not: cuda:99"


def test_missing_devices_are_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = report(capsys, "--seconds", "0")
    assert status == 0
    assert "device cuda" in text
    assert "device npu" in text


def test_wrong_weights_and_saves_fail_the_self_test(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = torch.optim.Adagrad
    monkeypatch.setattr(torch.optim, "Adagrad", lambda parameters, lr: real(parameters, lr=2 * lr))
    monkeypatch.setattr(
        self_test.TableOptimizer,
        "create",
        lambda cls, options, create=self_test.TableOptimizer.create: create(real, options),
    )
    status, text = report(capsys, "--seconds", "0.01", "--device", str(device))
    assert status == 1
    assert "FAILED: 5 steps" in text
    monkeypatch.undo()
    monkeypatch.setattr(self_test.Saver, "load", lambda *_: None)
    status, text = report(capsys, "--seconds", "0.01", "--device", str(device))
    assert status == 1
    assert "A SAVE LOADS WITH OTHER BITS" in text


def test_a_self_test_that_raises_is_one_line(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a kernel\nfailed")

    monkeypatch.setattr(self_test, "train", broken)
    status, text = report(capsys, "--device", str(device))
    assert status == 1
    assert "self-test, 10 s: FAILED: RuntimeError: a kernel failed\n" in text


def test_without_torch_the_rest_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_import_problem", lambda module: f"no {module}")
    status, text = report(capsys)
    assert status == 1
    assert text.splitlines()[-1] == "Nothing can be used: no torch"
    assert "host memory" in text


def test_sizes_are_readable() -> None:
    assert [machine.format_bytes(each) for each in (512, 1536, 3 << 20, 5 << 30, 3 << 41)] == [
        "512 B", "1.5 KiB", "3.0 MiB", "5.0 GiB", "6144.0 GiB",
    ]  # fmt: skip
