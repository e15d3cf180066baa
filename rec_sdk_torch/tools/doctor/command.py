"""Reports versions, devices, memory and threads of this machine, and trains a small table on each device.

Attach the report to a question. The command changes nothing and writes only to a temporary folder. A device that does
not work is listed with the reason. The self-test trains a cached table for ten seconds on each working device, and the
same table in plain torch. It compares all weights, then saves the table and loads the save. The exit status is 0 if the
CPU and every working device pass. It is 1 if a device fails, a device of --device does not work, or nothing can be
imported. It is 2 after a wrong argument.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from ... import __version__
from ...runtime.command import CommandParser
from ...runtime.lazy import torch_npu_problem
from . import machine

PROGRAM = "python -m rec_sdk_torch.doctor"
EXAMPLE = f"""
{PROGRAM} > report.txt
{PROGRAM} --seconds 1 --device cpu
python -m rec_sdk_torch.emulate -m rec_sdk_torch.doctor
"""
KINDS = ("cpu", "cuda", "npu")


def _section(title: str, lines: Iterable[str]) -> None:
    print(f"\n{title}")
    for line in lines:
        print(f"  {line}", flush=True)


def _message_on_one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _import_problem(module: str) -> str:
    """Returns the reason why a module cannot be imported, "" if it can."""
    try:
        importlib.import_module(module)
    except Exception as error:
        return torch_npu_problem(error) or f"{type(error).__name__}: {_message_on_one_line(error)}"
    return ""


def _settings() -> list[str]:
    from ...runtime.settings import read_settings

    try:
        return [f"{name.upper()} = {value}" for name, value in vars(read_settings()).items()]
    except ValueError as error:
        return [f"a setting cannot be read: {_message_on_one_line(error)}"]


def _torch_lines() -> list[str]:
    import torch

    from ...operators.schemas import cpu_isa
    from ...runtime.emulator import active

    return [
        f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}, {torch.get_num_threads()} threads",
        f"CPU kernels: {cpu_isa()}",
        f"EMBCACHE settings: {', '.join(_settings())}",
        f"emulated NPU: {'this process runs on it' if active() else 'not in use'}",
        f"torchrec: {_import_problem('torchrec') or 'imports'}",
    ]


def _check_device(kind: str, seconds: float) -> bool | None:
    """Prints whether a device works and passes the self-test; returns whether it passes, None if it does not work."""
    from ...operators.devices.backends import backend_for, parse_device

    print(f"\ndevice {kind}", flush=True)
    try:
        device = parse_device(kind)
        free = backend_for(device).free_memory(device)
    except Exception as error:  # torch_npu and CUDA raise exceptions of many types
        print(f"  does not work here: {_message_on_one_line(error)}", flush=True)
        return None
    print(f"  works: {device}, {machine.format_bytes(free)} free", flush=True)
    if not seconds:
        return True
    print(f"  self-test, {seconds:g} s: ", end="", flush=True)
    from . import self_test

    try:
        outcome = self_test.train(device, seconds)
    except Exception as error:
        print(f"FAILED: {type(error).__name__}: {_message_on_one_line(error)}", flush=True)
        return False
    print(f"{'passed' if outcome.passed else 'FAILED'}: {outcome}", flush=True)
    return outcome.passed


def _parser() -> CommandParser:
    parser = CommandParser(prog=PROGRAM, description=__doc__, example=EXAMPLE)
    parser.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        help="duration of each device's self-test; 0: no test (default: %(default)g)",
    )
    parser.add_argument(
        "--device",
        action="append",
        help="cpu, cuda, npu, or one with an index, such as cuda:1; may be repeated; default: all three",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the report and returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not 0 <= options.seconds <= 3600:
        parser.error(f"--seconds is {options.seconds:g}, it must be from 0 to 3600")
    for device in options.device or ():
        if device.partition(":")[0] not in KINDS:
            parser.error(f"--device is {device!r}, it must be one of {', '.join(KINDS)}, or one with its index")
    print(f"rec_sdk_torch {__version__}, {Path(__file__).resolve().parents[2]}")
    _section("system", [*machine.system(), *machine.processors()])
    _section("memory", machine.memory())
    _section("packages", machine.packages())
    _section("parts of rec_sdk_torch", machine.libraries())
    problem = _import_problem("torch") or _import_problem("rec_sdk_torch.tbe")
    if problem:
        print(f"\nNothing can be used: {problem}")
        return 1
    _section("as imported", _torch_lines())
    passed = {device: _check_device(device, options.seconds) for device in options.device or KINDS}
    required = options.device or ("cpu",)
    failed = [device for device, ok in passed.items() if ok is False or (ok is None and device in required)]
    works, broken = ([device for device, ok in passed.items() if bool(ok) is wanted] for wanted in (True, False))
    print(f"\nworks: {', '.join(works) or 'nothing'}; does not: {', '.join(broken) or 'nothing'}")
    return 1 if failed else 0
