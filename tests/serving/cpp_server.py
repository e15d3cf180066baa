"""Starts the C++ example server and sends it queries."""

from __future__ import annotations

import json
import os
import subprocess
import zlib
from pathlib import Path

import numpy as np
import torch
from cpp_units import TESTS, Tree

from rec_sdk_torch.serving import TableReader

EXAMPLE = TESTS.parent / "examples" / "cpp_server"
TREE = Tree("cpp-server", EXAMPLE, ["-DCMAKE_COMPILE_WARNING_AS_ERROR=ON"])
IDS = np.array([*range(0, 460, 7), -(2**63), 2**63 - 1, 10**12, 999])


class Server:
    """A C++ server of one table, queried line by line."""

    def __init__(self, program: Path, table: str, *folders: Path, log: Path | None = None) -> None:
        """Starts the server; `log` is a new file for its standard error."""
        pipe, self._log = subprocess.PIPE, log
        command = [str(program), table, *map(str, folders)]
        with open(log or os.devnull, "w") as errors:
            self._run = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True)

    def request(self, question: str, lines: int = 1) -> list[str]:
        assert self._run.stdin
        assert self._run.stdout
        self._run.stdin.write(question + "\n")
        self._run.stdin.flush()
        answers: list[str] = []
        while len(answers) < lines and not (answers and answers[-1].startswith("error")):  # an error is one line
            answers.append(self._run.stdout.readline().rstrip("\n"))
        return answers

    def errors(self) -> str:
        """Returns the text in the server's log."""
        return self._log.read_text() if self._log else ""

    def bytes_read(self) -> int:
        """Returns the number of bytes that the server's system calls have read so far; mapped memory does not count."""
        fields = dict(line.split(": ") for line in Path(f"/proc/{self._run.pid}/io").read_text().splitlines())
        return int(fields["rchar"])

    def close(self) -> None:
        self._run.communicate()
        assert self._run.returncode == 0


def check(server: Server, reader: TableReader) -> None:
    """Requests the rows of ids, of which some are unknown, and their sum and mean."""
    weights, found = reader.find(torch.from_numpy(IDS))
    ids = " ".join(map(str, IDS))
    lines = [line.split() for line in server.request(f"find {ids}", len(IDS))]
    assert [line[0] for line in lines] == [str(int(there)) for there in found]
    assert np.array_equal(np.array([line[1:] for line in lines], np.float32), weights.float().numpy(), equal_nan=True)
    for pooling in ("sum", "mean"):
        (line,) = server.request(f"{pooling} {ids}")
        expected = reader.lookup_pooled(IDS, np.array([0, len(IDS)]), pooling=pooling)
        assert np.array_equal(np.array([line.split()[1:]], np.float32), expected, equal_nan=True)


def refused(program: Path, *arguments: str | Path, **variables: str) -> str:
    finished = subprocess.run(
        [program, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | variables,
    )
    assert finished.returncode == 1, finished.stderr
    return finished.stderr


def rewritten(text: bytes, change: dict[str, object]) -> bytes:
    """Returns a manifest with changed fields and a correct checksum."""
    body = json.loads(text) | change
    del body["checksum"]
    plain = (json.dumps(body, indent=1, sort_keys=True) + "\n").encode()
    place = plain.index(b'\n "created": ')
    return plain[:place] + b'\n "checksum": %d,' % zlib.crc32(plain) + plain[place:]
