"""A server of the model without its code: it reads saved tables, and runs the dense part as an exported program."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from dlrm.served import Request, answer
from support.errors import InputError
from torch import Tensor, nn

from job.versions import Version, latest_name, program_path, read_version
from rec_sdk_torch.serving import TableReader

CLOSE = 1e-5
"""The largest accepted difference from an answer of the live model, which adds in another order on some devices."""


class Server:
    """A server that answers requests with one version at a time, and switches to later ones."""

    def __init__(self, folder: Path) -> None:
        """Opens the latest version.

        Raises:
            InputError: there is no version yet.
        """
        self._folder = folder
        self._name: str | None = None
        if latest_name(folder) is None or not program_path(folder).exists():
            raise InputError(f"{folder} has no version of a model yet; whole_job.py train {folder} writes them")
        self._program: nn.Module = torch.export.load(program_path(folder)).module()
        self.reload()

    def reload(self) -> bool:
        """Switches to the latest version, and returns whether it is a new one.

        A version is served only if its answers equal the live model's.
        """
        name = latest_name(self._folder)
        assert name is not None
        if name == self._name:
            return False
        version = read_version(self._folder, name)
        # The readers open one save instead of the folder, so that tables and dense part are from the same step.
        readers = {table: TableReader(version.tables, table) for table in version.state["requests"][1]}
        self._readers, self._version, self._name = readers, version, name
        self._program.load_state_dict(version.state["dense"])
        self.difference = float((self.answer(version.state["requests"]) - version.state["answers"]).abs().max())
        if not self.difference <= CLOSE:
            raise InputError(f"version {name}: answers differ by {self.difference:.2g} from the live model's")
        return True

    @property
    def version(self) -> Version:
        """The version that currently answers requests."""
        return self._version

    def answer(self, request: Request) -> Tensor:
        """Returns the probabilities of clicks, float32 [B]."""
        return answer(self._program, self._readers, request)


def serve(folder: Path, until: int | None, seconds: float) -> None:
    """Serves the requests of each version, and follows new versions until the one of step `until`.

    Raises:
        InputError: there is no version; the answers of one differ from the live model's; none appears within `seconds`.
    """
    server = Server(folder)
    patience = time.monotonic() + seconds
    while True:
        step, requests = server.version.state["step"], server.version.state["requests"]
        begin = time.perf_counter()
        answers = server.answer(requests)
        took = (time.perf_counter() - begin) * 1e3
        print(
            f"step {step}: {len(answers)} requests in {took:.1f} ms from {server.version.tables.name},"
            f" at most {server.difference:.1g} from the live model",
            flush=True,
        )
        if until is None or step >= until:
            return
        while not server.reload():
            if time.monotonic() > patience:
                raise InputError(f"{folder} stays at step {step}: step {until} did not come in {seconds:g} s")
            time.sleep(0.05)
        patience = time.monotonic() + seconds
