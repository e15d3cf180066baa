"""Versions of the model: a save of the tables, and beside it everything else of the same moment.

FOLDER/tables/<name>       a save of the tables, by Saver: full, or a delta of the save before
FOLDER/versions/<name>.pt  step, dense weights, the state of their optimizer, curves, requests with their answers
FOLDER/dense.pt2           the dense part as a program of torch.export; a version has its weights

The file in versions/ is written last, under another name first. So a version that is there is complete, whenever the
job was killed, and the job goes on from it; a save of the tables without such a file is passed over.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.errors import InputError, open_problem
from torch import nn

from rec_sdk_torch import Saver

State = dict[str, Any]
"""Tensors, numbers, texts, and lists and dictionaries of them: what torch.load takes with weights_only."""


@dataclass(frozen=True)
class Version:
    """One version that is complete."""

    tables: Path
    """The save of the tables."""
    state: State


def tables_of(folder: Path) -> Path:
    """Where the saves of the tables lie."""
    return folder / "tables"


def versions_of(folder: Path) -> Path:
    """Where the files of the versions lie."""
    return folder / "versions"


def program_of(folder: Path) -> Path:
    """Where the exported dense part lies."""
    return folder / "dense.pt2"


def latest_name(folder: Path) -> str | None:
    """The name of the latest version, or None where there is none. Names are times, and so is their order."""
    names = [path.stem for path in versions_of(folder).glob("*.pt")]
    return max(names, default=None)


def read_version(folder: Path, name: str) -> Version:
    """Reads a version, to the CPU.

    Raises:
        InputError: it cannot be read.
    """
    path = versions_of(folder) / f"{name}.pt"
    try:
        state: State = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise open_problem(path, error) from error
    except Exception as error:  # torch has many for a file that is no archive, or cut
        raise InputError(f"cannot read {path}: damaged ({type(error).__name__})") from error
    return Version(tables_of(folder) / name, state)


class VersionWriter:
    """Writes versions while the model trains on. All ranks have one and call it in the same steps."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._saver = Saver()
        self._writing: tuple[Future[str], State, str] | None = None

    def begin(self, model: nn.Module, state: State, incremental: bool) -> None:
        """Takes this moment of the tables and `state`, which nothing may change later, and writes them in a thread."""
        self.finish()  # one at a time: a version is complete before the next one begins
        saving = self._saver.save(model, tables_of(self._folder), incremental, background=True)
        self._writing = saving, state, "delta" if incremental else "full"

    def look(self) -> None:
        """Makes the version complete when the tables are written; does not wait for it."""
        if self._writing is not None and self._writing[0].done():
            self.finish()

    def finish(self) -> None:
        """Waits for the version that is being written. Raises what went wrong with it."""
        if self._writing is None:
            return
        saving, state, kind = self._writing
        self._writing = None
        name = Path(saving.result()).name
        if self._rank == 0:
            write_whole(versions_of(self._folder) / f"{name}.pt", state)
            print(f"step {state['step']}: saved as {name} ({kind})", flush=True)


def write_whole(path: Path, state: State) -> None:
    """Writes a file that is there whole or not at all, also where the machine fails."""
    unfinished = path.parent / f".{path.name}.unfinished"
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
