"""Runs interpreters up to their regular exit, each forked from a process that has already imported torch.

Processes of `forked_python.python` skip the interpreter's own shutdown, as `multiprocessing` does.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SECONDS = 120
"""The time limit of an interpreter, after which it is killed (status -14)."""


@dataclass(frozen=True)
class Exit:
    """The exit of an interpreter: its status (negative for a signal), and its output, including stderr."""

    number: int
    status: int
    printed: str


class Interpreters:
    """Interpreters that are forked from a process that has already imported a test module or torch."""

    def __init__(self, module: str, **variables: str) -> None:
        """Starts the process that imports `module`; `variables` are added to its environment."""
        pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        command = [sys.executable, __file__, module]
        self._process = subprocess.Popen(command, **pipe, env=os.environ | variables, text=True)

    def run(self, code: str, count: int, folder: Path) -> list[Exit]:
        """Runs `code` in `count` interpreters, one after another; the code can use the module, `number` and
        `folder`.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([code, count, str(folder)]) + "\n")
        self._process.stdin.flush()
        return [Exit(*each) for each in json.loads(self._process.stdout.readline())]

    def close(self) -> None:
        """Ends the process from which the interpreters are forked."""
        self._process.communicate()


def _serve() -> tuple[str, int, str] | None:
    """Forks a process for each request; returns (code, number, folder) in the child, and finally None in the parent."""
    for line in sys.stdin:
        code, count, folder = json.loads(line)
        ends = []
        for number in range(count):
            with tempfile.TemporaryFile() as output:
                pid = os.fork()
                if pid == 0:
                    signal.alarm(SECONDS)
                    for descriptor in (1, 2):
                        os.dup2(output.fileno(), descriptor)
                    return code, number, folder
                _, status = os.waitpid(pid, 0)
                output.seek(0)
                ends.append((number, os.waitstatus_to_exitcode(status), output.read().decode()))
        print(json.dumps(ends), flush=True)
    return None


if __name__ == "__main__":
    _module = importlib.import_module(sys.argv[1])
    _mine = _serve()
    if _mine is not None:
        _names = {"__name__": "__main__", "number": _mine[1], "folder": Path(_mine[2])}
        exec(_mine[0], {_module.__name__: _module, **_names})
