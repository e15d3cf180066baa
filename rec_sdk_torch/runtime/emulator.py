"""Runs a program on the emulated NPU: software with the interface of an Ascend NPU, for machines without an NPU.

    python -m rec_sdk_torch.emulate train.py --epochs 3
    python -m rec_sdk_torch.emulate -m pytest tests
    LD_LIBRARY_PATH=$(python -m rec_sdk_torch.emulate --lib) python train.py

The program itself is not changed: torch_npu provides the device "npu" and the backend "hccl". This module does not
import torch, which cannot be imported if torch_npu is installed without CANN.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .command import CommandParser

__all__ = ["EmulatorUnavailableError", "active", "check", "hint", "library_directory", "main"]

# CANN's runtime library. The emulator has a library of the same name, recognized by a function that only it has.
_RUNTIME = "libascendcl.so"
_FUNCTION = "rec_sdk_emulator_launch"
_CANN_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_USAGE_ERROR = 2


_DESCRIPTION = """Runs a Python program that uses torch_npu on an emulated NPU. No NPU and no CANN is needed.

Device "npu" and backend "hccl" are torch_npu's own. The runtime below them is emulated in host memory, and checks
kernels against the rules of the hardware. Results are valid, times are not. docs/emulator.md has the settings.
"""
_EXAMPLE = """
python -m rec_sdk_torch.emulate train.py --epochs 3
python -m rec_sdk_torch.emulate --devices 4 -m torch.distributed.run --nproc-per-node 4 train.py
python -m rec_sdk_torch.emulate --streams random:1 -m pytest tests
"""

_ROOT = Path(__file__).resolve().parents[2]  # the repository, if the package is used from a source tree


class EmulatorUnavailableError(Exception):
    """The error if the emulated NPU cannot be used on this machine; its message gives the reason and the remedy."""


def library_directory() -> Path:
    """Returns the folder of the emulator's libraries."""
    return Path(__file__).resolve().parents[1] / "_emulator"


def _missing_library() -> Path | None:
    """Returns the path of a library of the emulated NPU that has not been built; None if all have been built."""
    libraries = (library_directory() / _RUNTIME, Path(__file__).resolve().parents[1] / "_ops_npu.so")
    return next((path for path in libraries if not path.exists()), None)


def _has_torch_npu() -> bool:
    return importlib.util.find_spec("torch_npu") is not None


def _setup_commands() -> str:
    """Returns the shell command that builds the emulated NPU and runs a program on it.

    The command uses a virtual environment of its own: with torch_npu installed, torch cannot be imported without CANN.
    """
    launch = "python -m rec_sdk_torch.emulate program.py"
    if (_ROOT / "Makefile").exists():
        return f"make -C {_ROOT} build-npu && {_ROOT}/.venv-npu/bin/{launch}"
    return f"make build-npu && .venv-npu/bin/{launch}, in the repository of rec_sdk_torch"


def hint() -> str:
    """Returns a sentence for error messages: the command that runs a program here without an NPU."""
    here = _has_torch_npu() and _missing_library() is None
    command = f"{sys.executable} -m rec_sdk_torch.emulate program.py" if here else _setup_commands()
    return f"Without an NPU, run the program on the emulated NPU: {command}"


def active() -> bool:
    """Returns whether this process uses the emulated NPU; False before torch_npu is imported."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        runtime = ctypes.CDLL(_RUNTIME, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False  # CANN's runtime library is not loaded, so no NPU is used
    return hasattr(runtime, _FUNCTION)


def cann() -> str | None:
    """Returns evidence of a real CANN on this machine (`NAME=value` or a library's path); None if there is no CANN."""
    for name in _CANN_VARIABLES:
        if os.environ.get(name):
            return f"{name}={os.environ[name]}"
    ldconfig = next((path for path in ("/sbin/ldconfig", "/usr/sbin/ldconfig") if Path(path).exists()), "ldconfig")
    try:
        listed = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return None
    for line in listed.splitlines():
        if line.strip().startswith(_RUNTIME):
            return line.rpartition("=> ")[2].strip()
    return None


def check(force: bool = False) -> Path:
    """Checks that a program can run on the emulated NPU, and returns the folder of the emulator's libraries.

    Raises:
        EmulatorUnavailableError: the libraries are not built, torch_npu is not installed, or a real CANN is installed
            and `force` is False.
    """
    if not _has_torch_npu():
        raise EmulatorUnavailableError(
            f"torch_npu is not installed for {sys.executable}. To run the program: {_setup_commands()}"
        )
    missing = _missing_library()
    if missing is not None:
        raise EmulatorUnavailableError(
            f"the emulated NPU is not built: {missing} is missing. To build it and run the program: {_setup_commands()}"
        )
    real = None if force else cann()
    if real:
        raise EmulatorUnavailableError(
            f"a real CANN is installed ({real}): run the program without the emulator, or with --force on it anyway"
        )
    return library_directory()


def _environment(folder: Path, options: argparse.Namespace) -> dict[str, str]:
    """Returns the environment in which a program and its child processes load the emulator's libraries."""
    environment = dict(os.environ)
    paths = [path for path in environment.get("LD_LIBRARY_PATH", "").split(os.pathsep) if path]
    environment["LD_LIBRARY_PATH"] = os.pathsep.join([str(folder), *(path for path in paths if path != str(folder))])
    if options.force:
        # With these variables, torch_npu and the program would find the real CANN.
        for name in _CANN_VARIABLES:
            environment.pop(name, None)
    settings = {
        "REC_SDK_EMULATED_DEVICES": options.devices,
        "REC_SDK_EMULATED_SOC": options.soc,
        "REC_SDK_EMULATED_MEMORY": options.memory,
        "REC_SDK_EMULATED_STREAMS": options.streams,
    }
    environment.update({name: value for name, value in settings.items() if value is not None})
    return environment


def _parse_devices(text: str) -> str:
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; it must be a number from 1 to 64")
    return text


def _parse_memory(text: str) -> str:
    match = re.fullmatch(r"([1-9][0-9]*)([KMG]?)", text)
    size = int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]] if match else 0
    if not 1 << 20 <= size <= 1 << 40:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; it must be 1M to 1024G, as bytes or with K, M or G")
    return text


def _parse_streams(text: str) -> str:
    seed = re.fullmatch(r"random:([0-9]+)", text)
    if text not in ("eager", "late") and not (seed and int(seed[1]) < 1 << 64):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not allowed; it must be eager, late, or random:SEED with a whole number below 2^64"
        )
    return text


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m rec_sdk_torch.emulate",
        description=_DESCRIPTION,
        usage="%(prog)s [options] (program.py | -m module) [arguments]\n       %(prog)s --lib",
        example=_EXAMPLE,
        allow_abbrev=False,
    )
    parser.add_argument("--devices", type=_parse_devices, metavar="N", help="emulated NPUs of the machine (default 2)")
    parser.add_argument(
        "--soc", metavar="NAME", help="chip whose rules kernels are checked against (default Ascend910B1)"
    )
    parser.add_argument(
        "--memory", type=_parse_memory, metavar="SIZE", help="memory of each NPU, such as 512M (default 16G)"
    )
    parser.add_argument(
        "--streams",
        type=_parse_streams,
        metavar="ORDER",
        help="when streams run: eager, late or random:SEED (default eager)",
    )
    parser.add_argument("--force", action="store_true", help="emulate although a real CANN is installed")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--lib", action="store_true", help="only print the folder to put into LD_LIBRARY_PATH")
    what.add_argument("-m", dest="module", action="store_true", help="the program is a module, as in python -m")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="the program, and what follows it")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line: replaces this process by the program, and returns only if there is no program to run.

    Returns:
        0 after `--lib`; 2 after an error, which is printed to stderr in one line.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.program[:1] == ["--"]:
        del options.program[0]
    if options.lib == bool(options.program):
        parser.error("give a program to run" if not options.program else "--lib takes no program")
    if options.program and not options.module and not Path(options.program[0]).exists():
        parser.error(f"there is no file {options.program[0]!r}; to run a module, put -m before it")
    try:
        folder = check(options.force)
    except EmulatorUnavailableError as error:
        print(f"rec_sdk_torch.emulate: {error}", file=sys.stderr)
        return _USAGE_ERROR
    if options.lib:
        print(folder)
        return 0
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    command = [sys.executable, *flags, *(["-m"] if options.module else []), *options.program]
    # exec instead of runpy: the dynamic linker reads LD_LIBRARY_PATH only when a process starts.
    os.execve(sys.executable, command, _environment(folder, options))
