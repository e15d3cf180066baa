"""`python -m rec_sdk_torch` lists every command; each command has a detailed help text and one-line errors."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import forked_python
import pytest

from rec_sdk_torch.__main__ import COMMANDS, main, usage

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "rec_sdk_torch"


def run(*arguments: str | Path, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs `python -m *arguments` in a process of its own."""
    return forked_python.python("-m", *arguments, folder=folder, PYTHONPATH=str(ROOT))


def modules() -> set[str]:
    """Lists the modules of the package that can be run as `__main__`."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        body = ast.parse(path.read_text()).body
        runs = any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in body)
        if runs:
            name = path.relative_to(PACKAGE).with_suffix("")
            found.add(".".join(name.parts).removesuffix("__main__").removesuffix("."))
    return found


def test_every_command_is_listed() -> None:
    assert modules() == {*COMMANDS, ""}
    assert all(name in usage() and text in usage() for name, text in COMMANDS.items())


def test_the_list_needs_no_torch() -> None:
    code = "import sys; from rec_sdk_torch.__main__ import main; main([]); print('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert "cache_advice" in done.stdout


def test_a_command_runs_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    done = run("rec_sdk_torch", "checkpoint", "show", ROOT)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("python -m rec_sdk_torch.checkpoint: ")
    assert main(["nothing"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.count(".") >= 2


def exit_status(command: str, arguments: list[str]) -> int:
    """Runs a command's `main` in this process; returns its exit status."""
    place = "" if (PACKAGE / f"{command}.py").exists() else ".__main__"
    try:
        return int(importlib.import_module(f"rec_sdk_torch.{command}{place}").main(arguments))
    except SystemExit as ended:
        return int(ended.code or 0)


HERE = [name for name in COMMANDS if name != "compat"]
"""All commands except the one that changes torch on import, whose wrong input is tested in tests/compat."""


def check_help(text: str, command: str) -> None:
    text, _, example = text.partition("\nexample:\n")
    assert f"-m rec_sdk_torch.{command} " in example or f"-m rec_sdk_torch.{command}\n" in example
    assert len(text.split()) > 60
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("command", HERE)
def test_help_has_an_example_and_enough_text(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(command, ["--help"]) == 0
    check_help(capsys.readouterr().out, command)


def test_help_of_compat_has_an_example_and_enough_text() -> None:
    done = run("rec_sdk_torch.compat", "--help")
    assert done.returncode == 0, done.stderr
    check_help(done.stdout, "compat")


WRONG = {
    "cache_advice": [[], ["no.npz"], ["no.txt"], ["no.npz", "--batch", "0"], ["no.npz", "--sizes", "a"], ["x", "--y"]],
    "checkpoint": [[], ["sing"], ["show"], ["show", "no/where"], ["verify", "setup.py"], ["export", "docs", "out"]],
    "doctor": [["x"], ["--seconds", "-1"], ["--seconds", "soon"], ["--device", "tpu"]],
    "emulate": [[], ["no.py"], ["--devices", "0", "x.py"], ["--lib", "x.py"]],
    "npu_check": [["--rows", "0"], ["--rows", "x"], ["x"], ["--device", "tpu"], ["--device", "cpu"]],
}


@pytest.mark.parametrize(
    ("command", "arguments"), [(name, arguments) for name, cases in WRONG.items() for arguments in cases]
)
def test_wrong_input_is_one_line(command: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(command, arguments) in (1, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith(f"python -m rec_sdk_torch.{command}")
    assert ": " in line


def test_wrong_input_has_no_traceback_in_a_process() -> None:
    done = run("rec_sdk_torch.cache_advice", "setup.py", folder=ROOT)
    assert (done.returncode, done.stdout) == (1, "")
    problem = "setup.py: the name of a trace ends in .npz, .safetensors, .parquet"
    assert done.stderr == f"python -m rec_sdk_torch.cache_advice: {problem}\n"


def test_commands_are_documented() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    assert [name for name in COMMANDS if f"python -m rec_sdk_torch.{name}" not in page] == []
