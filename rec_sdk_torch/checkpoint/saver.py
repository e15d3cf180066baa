"""`Saver`: the tables of a model to a folder and back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..tbe.whole import versions
from . import files, folders, rec_sdk
from .errors import CheckpointError
from .loading import check, replace, takes_all, warn_of_losses
from .manifest import Manifest
from .marks import drop_marks, set_mark
from .owners import Owner, owners_of
from .reading import match, verify
from .saving import Start, Written, begin, check_tracked, finish, follows, give_up, keys_of, manifest_of, note, write
from .team import Team

PathLike = str | os.PathLike[str]


class Saver:
    """Saves and loads the tables of a model: rows, optimizer states, steps and options, open accumulation windows.

    A model: a collection or a `TableBatchedEmbedding`, a module that has some, or what DistributedModelParallel made of
    one. All ranks that share sharded tables call `save` and `load` together, with one `path` that all of them see.
    """

    def __init__(self, rank: int | None = None) -> None:
        """
        Args:
            rank: of this process, as in Rec SDK; that of the process group when None.

        Raises:
            ValueError: a negative one, or another than the process group says.
            TypeError: no int.
        """
        if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int)):
            raise TypeError(f"rank is {rank!r}, expected an int")
        here = torch.distributed.get_rank() if torch.distributed.is_initialized() else None
        if rank is not None and (rank < 0 or rank != (rank if here is None else here)):
            raise ValueError(f"rank is {rank}, expected {'0 or more' if here is None else here}")
        self.rank = rank if rank is not None else (here or 0)

    @staticmethod
    def is_timestamp_format(dir_name: str) -> bool:
        """Whether a folder of this name holds a save: date and time, 14 digits."""
        return folders.is_timestamp(dir_name)

    @staticmethod
    def get_latest_load_path(path: PathLike) -> str:
        """The latest complete save in the folder `path`.

        Raises:
            CheckpointError: there is none.
        """
        return str(folders.latest_save(Path(path)).resolve())

    def save(self, module: torch.nn.Module, path: PathLike, incremental: bool = False) -> str:
        """Writes one moment of all tables of `module` to a new folder in `path`, and returns that folder.

        Others wait meanwhile that train or read them. Batches may be in flight, windows open, others prefetched: rows
        are as the latest backward pass left them.

        Args:
            module: the model.
            path: a folder for the saves of one job; made when it is not there.
            incremental: only rows that changed since this model was last saved to or loaded from `path`, and the ids
                that were removed since. A full save where there is none that a delta can follow.

        Raises:
            ValueError: a module without tables; `incremental` for tables that do not keep what changed.
            CheckpointError: somebody else saves to `path` now.
            OSError: a file cannot be written; earlier saves are as before.
        """
        owners = owners_of(module)
        if incremental:
            check_tracked(owners)
        team, root = Team(owners), Path(path).resolve()
        with _held(team, root), _one_moment(owners):
            start: Start | None = None
            try:
                found = team.gather(follows(owners, str(root)) if incremental else [None])
                start = team.first(lambda: begin(root, [each for of_rank in found for each in of_rank]))
                written, folder = self._write(owners, team, start, root)
            except BaseException:
                if team.rank == 0:
                    give_up(start)
                raise
            note(owners, str(root), start, written)
        return str(folder)

    @staticmethod
    def _write(owners: Sequence[Owner], team: Team, start: Start, root: Path) -> tuple[Written, Path]:
        keys = keys_of(owners)
        of_ranks = team.together(lambda: write(owners, keys, start, team.rank, str(root)))
        folder = team.first(lambda: finish(root, start, manifest_of(owners, keys, start, of_ranks)))
        return of_ranks[team.rank], folder

    def load(self, module: torch.nn.Module, path: PathLike, incremental: bool = False) -> str:
        """Makes the tables of `module` what the latest save in `path`, or the save `path`, has of them.

        Cache size, device, data type, prefetching and the number of ranks may be others than those of the model that
        was saved. With another optimizer only weights are loaded, and a warning says so.

        Args:
            module: the model; optimizers have to be applied, if it is to train.
            path: what `save` was given, or what it returned; or a save of Rec SDK's, which has no steps and options.
            incremental: of a save of Rec SDK's: its rows are written over those of the tables, in which all others
                stay. A save of this package is read with all that it follows either way.

        Returns:
            The save that was loaded.

        Raises:
            CheckpointError: a file is missing, damaged or of something else; the model is as it was.
            CapacityError, MemoryError: more rows than fit; the model is as it was.
            RuntimeError: batches are in flight; the model is as it was.
        """
        owners = owners_of(module)
        team = Team(owners)
        foreign = team.first(lambda: rec_sdk.folder_of(Path(path).resolve()))
        if foreign is not None:
            return _load_rec_sdk(owners, team, foreign, incremental)
        folder = Path(team.first(lambda: str(folders.latest_save(Path(path)).resolve())))
        chain: list[tuple[Path, Manifest]] = []

        def read() -> None:
            chain.extend(folders.chain_of(folder))
            match(owners, chain)
            verify(chain, team.rank, team.size)

        team.together(read)
        with _one_moment(owners):
            found = match(owners, chain)
            team.together(lambda: check(found, chain))
            warn_of_losses(found, chain)
            team.together(lambda: replace(owners, found, chain))
            last = chain[-1][1]
            for owner in owners:
                drop_marks(owner.embedding)
                if takes_all(found) and len(found) == len(last.tables):
                    version = versions(owner.embedding)
                    set_mark(owner.embedding, str(folder.parent), last.id, last.base, last.sequence, version)
        return str(folder)


def _load_rec_sdk(owners: Sequence[Owner], team: Team, folder: Path, incremental: bool) -> str:
    with _one_moment(owners):
        found: list[Any] = []
        team.together(lambda: found.extend(rec_sdk.read(owners, folder)))
        team.together(lambda: rec_sdk.replace(owners, found, incremental))
        for owner in owners:
            drop_marks(owner.embedding)
    return str(folder)


@contextlib.contextmanager
def _one_moment(owners: Sequence[Owner]) -> Iterator[None]:
    """Keeps other threads from all tables; always in one order, for two threads that save."""
    with contextlib.ExitStack() as stack:
        for owner in sorted(owners, key=lambda owner: id(owner.embedding)):
            stack.enter_context(owner.embedding.exclusive())
        yield


@contextlib.contextmanager
def _held(team: Team, root: Path) -> Iterator[None]:
    """Holds the lock of a folder of saves, on rank 0, for all ranks."""
    with contextlib.ExitStack() as stack:

        def hold() -> None:
            files.make_folder(root)
            if not stack.enter_context(files.held(root)):
                raise CheckpointError(f"{root}: another save is being written there now")

        team.first(hold)
        yield
