"""rec_sdk_torch.npu_check where there is no NPU; tests/emulator has the rest."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from rec_sdk_torch import npu_check


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed")
def test_without_an_npu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
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
    names = []
    for case in npu_check.cases(1000, 4096, 16):
        names.append(case.name)
        before = {name: tensor.clone() for name, tensor in case.inputs.items()}
        results = case.call({name: tensor.clone() for name, tensor in case.inputs.items()})
        assert all(torch.equal(case.inputs[name], tensor) for name, tensor in before.items())
        assert all(bool(tensor.float().isfinite().all()) for tensor in results.values())
        if "offsets" in case.inputs and "unique" in case.inputs:
            assert int(case.inputs["offsets"].diff().max()) > 128
    operators = {name.split()[0] for name in names}
    assert operators == {
        *("gather_rows", "scatter_rows", "swap_rows", "lookup_sequence", "lookup_pooled"),
        *("pooled_weights_grad", "update_rows", "accumulate_rows"),
    }
