"""rec_sdk_torch.npu_check without an NPU; tests/emulator tests it with one."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from rec_sdk_torch import npu_check
from rec_sdk_torch.operators.default import KERNELS
from rec_sdk_torch.tools import operator_cases


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed")
def test_a_missing_npu_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert npu_check.main([]) == 2
    error = capsys.readouterr().err
    assert "there is no NPU to check" in error
    assert "needs the package torch_npu" in error
    assert npu_check.main(["--device", "cpu"]) == 2
    assert "'cpu' is no NPU" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--rows", "0"], ["--lookups", "7"], ["--repeats", "-1"]])
def test_bad_options(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        npu_check.main(arguments)
    assert ended.value.code == 2
    assert f"{arguments[0]} is {arguments[1]}, it must be at least" in capsys.readouterr().err


def test_the_batch_has_hot_rows_and_every_operator_is_there() -> None:
    found = set()
    for case in operator_cases.all_cases(operator_cases.Batch.random(1000, 4096), 16):
        found.add(case.operator)
        copied = case.to("cpu")
        results = copied.results()
        again = case.to("cpu").arguments
        tensors = [name for name, value in case.arguments.items() if isinstance(value, torch.Tensor)]
        assert all(torch.equal(case.arguments[name], again[name]) for name in tensors)
        assert results
        assert all(bool(tensor.float().isfinite().all()) for tensor in results.values())
        if "segment_offsets" in case.arguments:
            assert int(case.arguments["segment_offsets"].diff().max()) > 128
    assert found == {name.partition(".")[0] for name in KERNELS}
