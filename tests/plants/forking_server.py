"""Runs pytest in processes forked from one that has imported torch and TorchRec, which saves four seconds per run.

Each line of standard input is a JSON object: `folder` to run in, `arguments` of pytest, `seconds` allowed, and an
`output` file. Each line of standard output is an exit status, or -9 after a timeout.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest


def be_pytest(order: dict[str, Any]) -> None:
    """Runs pytest in the folder, as `python -m pytest` does there, and ends the process."""
    os.setsid()
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.chdir(order["folder"])
    sys.path[0] = order["folder"]
    os.environ["PYTHONPATH"] = order["folder"]
    status = pytest.main(order["arguments"])
    sys.stdout.flush()
    os._exit(status)


def wait(process: int, seconds: float) -> int:
    """Returns the exit status of the process. After the timeout, kills the process and its children, and returns -9."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return -signal.SIGKILL


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    for module in ("passive_threads", "torch", "torchrec.distributed"):  # torch reads the setting of the first
        importlib.import_module(module)
    for line in sys.stdin:
        order = json.loads(line)
        process = os.fork()
        if process == 0:
            be_pytest(order)
        print(wait(process, order["seconds"]), flush=True)
