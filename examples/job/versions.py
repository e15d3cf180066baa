"""Versions of the model: a save of the tables, and a file with all other state at the same step.

FOLDER/tables/<name>       a save of the tables, by Saver: full, or a delta of the save before
FOLDER/versions/<name>.pt  step, dense weights, the state of their optimizer, curves, requests with their answers
FOLDER/dense.pt2           the dense part as a program of torch.export, without the weights of a version

The file in versions/ is written last, first under another name and then renamed. So a version with this file is
complete, and a job that was killed at any moment resumes from the last such version. A save of the tables without such
a file is ignored.
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
"""Tensors, numbers, texts, and lists and dictionaries of them, which torch.load reads with weights_only."""


@dataclass(frozen=True)
class Version:
    """A complete version of the model: its save of the tables, and all of its other state."""

    tables: Path
    """The save of the tables."""
    state: State


def tables_folder(folder: Path) -> Path:
    """Returns the folder of the saves of the tables."""
    return folder / "tables"


def versions_folder(folder: Path) -> Path:
    """Returns the folder of the files of the versions."""
    return folder / "versions"


def program_path(folder: Path) -> Path:
    """Returns the path of the exported dense part."""
    return folder / "dense.pt2"


def latest_name(folder: Path) -> str | None:
    """Returns the name of the latest version, or None if there is none. Names are times, so they sort by age."""
    names = [path.stem for path in versions_folder(folder).glob("*.pt")]
    return max(names, default=None)


def read_version(folder: Path, name: str) -> Version:
    """Reads a version into CPU memory.

    Raises:
        InputError: the version's file cannot be read.
    """
    path = versions_folder(folder) / f"{name}.pt"
    try:
        state: State = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise open_problem(path, error) from error
    except Exception as error:  # torch raises errors of many types for an invalid or truncated file
        raise InputError(f"cannot read {path}: damaged ({type(error).__name__})") from error
    return Version(tables_folder(folder) / name, state)


class VersionWriter:
    """A writer of versions while the model continues to train. All ranks have one and call it in the same steps."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._saver = Saver()
        self._writing: tuple[Future[str], State, str] | None = None

    def begin(self, model: nn.Module, state: State, incremental: bool) -> None:
        """Starts a version: copies the current state of the tables and writes it, with `state`, in a background thread.

        The caller must not change `state` afterwards.
        """
        self.finish()  # a version is complete before the next one begins
        saving = self._saver.save(model, tables_folder(self._folder), incremental, background=True)
        self._writing = saving, state, "delta" if incremental else "full"

    def poll(self) -> None:
        """Completes the version if its tables have been written; does not wait for them."""
        if self._writing is not None and self._writing[0].done():
            self.finish()

    def finish(self) -> None:
        """Waits for the version that is being written, and raises its error if writing failed."""
        if self._writing is None:
            return
        saving, state, kind = self._writing
        self._writing = None
        name = Path(saving.result()).name
        if self._rank == 0:
            write_whole(versions_folder(self._folder) / f"{name}.pt", state)
            print(f"step {state['step']}: saved as {name} ({kind})", flush=True)


def write_whole(path: Path, state: State) -> None:
    """Writes a file so that it exists completely or not at all, even if the machine fails."""
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
