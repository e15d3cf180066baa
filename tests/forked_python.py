"""Runs Python programs in processes that are forked from one that has imported torch.

Importing torch and TorchRec takes three to four seconds. Here only the first use spends this time, once for all later
tests. A test of how a process starts, imports, handles signals or exits must start a new process instead.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
"""A context of `multiprocessing` whose processes start with the modules imported that are preloaded below."""

_PRELOADED = ("torch", "torchrec.distributed", "sklearn.metrics", "rec_sdk_torch.modules.embedding_collections")
CONTEXT.set_forkserver_preload(list(_PRELOADED))

SECONDS = 300
"""The time limit of a process, after which it is killed."""


def python(
    *arguments: str | Path, folder: Path | None = None, **variables: str | None
) -> subprocess.CompletedProcess[str]:
    """Runs `python *arguments` in a forked process; the arguments may begin with `-m`, `-c` or a file.

    Args:
        arguments: the command line after `python`.
        folder: working directory; by default the current one.
        variables: environment variables to set; None removes one.

    Returns:
        The completed process, with its output.

    Raises:
        subprocess.TimeoutExpired: the program took longer than `SECONDS`.
    """
    (done,) = _run([variables], list(map(str, arguments)), folder)
    return done


def torchrun(
    count: int, *arguments: str | Path, folder: Path | None = None, **variables: str | None
) -> subprocess.CompletedProcess[str]:
    """Runs `torchrun --standalone --nproc-per-node count *arguments`; returns the concatenated output of all ranks."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    group |= {"OMP_NUM_THREADS": "1"} | variables
    of_ranks = [group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    ranks = _run(of_ranks, list(map(str, arguments)), folder)
    worst = max(ranks, key=lambda rank: abs(rank.returncode))
    output = ("".join(part) for part in zip(*((rank.stdout, rank.stderr) for rank in ranks), strict=True))
    return subprocess.CompletedProcess(worst.args, worst.returncode, *output)


def _run(
    of_each: Sequence[Mapping[str, str | None]], arguments: list[str], folder: Path | None
) -> list[subprocess.CompletedProcess[str]]:
    started = []
    with tempfile.TemporaryDirectory() as outputs:
        for number, variables in enumerate(of_each):
            files = [Path(outputs) / f"{name}{number}" for name in ("out", "err")]
            merged = dict(os.environ) | variables
            environment = {name: value for name, value in merged.items() if value is not None}
            process = CONTEXT.Process(target=_be, args=(arguments, str(folder or Path.cwd()), environment, files))
            process.start()
            started.append((process, files))
        until = time.monotonic() + SECONDS
        done = []
        for process, files in started:
            process.join(max(0.0, until - time.monotonic()))
            if process.exitcode is None:
                for each, _ in started:
                    each.kill()
                raise subprocess.TimeoutExpired(arguments, SECONDS, *(file.read_bytes() for file in files))
            output = (file.read_text() for file in files)
            done.append(subprocess.CompletedProcess(arguments, process.exitcode, *output))
    return done


def _be(arguments: list[str], folder: str, environment: dict[str, str], outputs: Sequence[Path]) -> None:
    """Executes the command line in the forked process, as Python would."""
    for descriptor, file in enumerate(outputs, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.stdout, sys.stderr = (open(d, "w", buffering=1, closefd=False) for d in (1, 2))  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if "OMP_NUM_THREADS" in environment:  # torch has already read the variable, in the parent process
        import torch

        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    kind, *rest = arguments
    search = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if kind == "-m":
        sys.argv[:] = rest
        sys.path[:0] = [folder, *search]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        sys.path[:0] = ["", *search]
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(rest[0], names)
    else:
        sys.argv[:] = arguments
        sys.path[:0] = [str(Path(kind).parent.resolve()), *search]
        runpy.run_path(kind, run_name="__main__")
