"""Tests of rec_sdk_torch.compat. Importing it changes the process, so each test runs separate processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked_python
import pytest
import torch

pytest.importorskip("torchrec")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def under_compat(*arguments: Any, cwd: Path = HERE) -> subprocess.CompletedProcess[str]:
    """Runs compat in a process that has imported torch, TorchRec and the collections, but not compat."""
    command = ("-m", "rec_sdk_torch.compat", *map(str, arguments))
    return forked_python.python(*command, folder=cwd, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")


def test_the_tests_under_compat_pass() -> None:
    finished = under_compat("-m", "pytest", "under_compat.py", "-p", "no:cacheprovider")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    count = len(re.findall(r"^def test_", (HERE / "under_compat.py").read_text(), re.MULTILINE))
    passed = re.search(r"(\d+) passed", finished.stdout)
    assert passed, finished.stdout
    assert int(passed[1]) >= count


def reference_losses(ranks: int, steps: int) -> list[list[float]]:
    """Computes the losses of small_script.py in plain torch, with one table and the mean of the ranks' losses."""
    table = torch.nn.Embedding.from_pretrained(torch.linspace(0, 1, 8).repeat(400, 1), freeze=False, sparse=True)
    torch.manual_seed(0)
    dense = torch.nn.Linear(8, 1)
    optimizers = [
        torch.optim.Adagrad(table.parameters(), lr=0.02, eps=1e-8),
        torch.optim.SGD(dense.parameters(), lr=0.1),
    ]
    generators = [torch.Generator().manual_seed(rank) for rank in range(ranks)]
    history: list[list[float]] = [[] for _ in range(ranks)]
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for rank, generator in enumerate(generators):
            loss = dense(table(torch.randint(0, 400, (16,), generator=generator))).square().mean()
            (loss / ranks).backward()
            history[rank].append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
    return history


def test_a_script_of_rec_sdk_runs_unchanged(tmp_path: Path) -> None:
    finished = under_compat(HERE / "small_script.py", "result", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    for rank, expected in enumerate(reference_losses(2, 4)):
        result = torch.load(tmp_path / f"result{rank}")
        assert result["losses"] == pytest.approx(expected, rel=1e-5)
        assert len(set(expected)) == 4
        assert result["eps"] == 1e-8


def test_the_program_sees_its_own_arguments(tmp_path: Path) -> None:
    beside = tmp_path / "beside.py"
    beside.write_text("VALUE = 7\n")
    script = tmp_path / "script.py"
    script.write_text("import sys, beside, hybrid_torchrec\nprint(__name__, sys.argv[1:], beside.VALUE)\nsys.exit(3)\n")
    # A fresh interpreter: compat comes before torch and TorchRec.
    command = [sys.executable, "-m", "rec_sdk_torch.compat", str(script), "-m", "--x"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stdout) == (3, "__main__ ['-m', '--x'] 7\n"), finished.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected a script, or -m and the name of a module, got 'nothing'"),
        (["-m"], "got '-m'"),
        (["--nothing"], "got '--nothing'"),
        (["nowhere.py"], "there is no script 'nowhere.py'; to run a module, put -m before it"),
        (["-m", "no_such_module"], "No module named 'no_such_module'"),
        (["-m", "json.no_such_module"], "No module named 'json.no_such_module'"),
        (["-m", "no_such.module"], "No module named 'no_such'"),
        (["-m", "concurrent"], "'concurrent' is a package without __main__"),
        (["-m", "script.py.x"], "No module named 'script'"),
        (["-m", ".relative"], "'.relative' is no name of a module"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str) -> None:
    finished = under_compat(*arguments)
    assert finished.returncode == 2
    (line,) = [line for line in finished.stderr.splitlines() if "Warning" not in line and not line.startswith(" ")]
    assert line.startswith("python -m rec_sdk_torch.compat: ")
    assert message in line
    assert "Traceback" not in finished.stderr


def test_an_import_error_of_the_users_module_is_kept(tmp_path: Path) -> None:
    """The original traceback, which names the user's code, is kept."""
    (tmp_path / "lacking.py").write_text("import no_such_module\n")
    finished = under_compat("-m", "lacking", cwd=tmp_path)
    assert finished.returncode == 1
    assert 'lacking.py", line 1' in finished.stderr


def python(program: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Runs a program with `path` on the module search path."""
    return forked_python.python("-c", program, PYTHONPATH=f"{ROOT}{os.pathsep}{path}")


def test_an_installed_package_is_kept_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "hybrid_torchrec").mkdir()
    (tmp_path / "hybrid_torchrec" / "__init__.py").write_text("HashEmbeddingBagCollection = 1\n")
    shadowed = python("import rec_sdk_torch.compat, hybrid_torchrec; print(hybrid_torchrec.__spec__.origin)", tmp_path)
    assert shadowed.stdout == "rec_sdk_torch.compat\n", shadowed.stderr
    assert f"hybrid_torchrec is installed ({tmp_path}" in shadowed.stderr
    late = python("import hybrid_torchrec, rec_sdk_torch.compat", tmp_path)
    assert late.returncode == 1
    assert f"ImportError: hybrid_torchrec was imported from {tmp_path}" in late.stderr
