"""`Saver`: the tables of a model to a folder and back."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, overload

import torch

from ..runtime.exits import OwnThread, calls
from ..tbe import next_serial, versions
from .format import folders
from .format.errors import CheckpointError
from .format.folders import PathLike, Paths, Place
from .format.manifest import Manifest
from .load import rec_sdk
from .load.cache_warming import warm_by_counts, warm_tables
from .load.capacity import has_room_beside
from .load.loader import can_be_followed, check, check_counts, put_in_place, replacements, warn_of_losses
from .load.save_reader import match, verify
from .owners import Owner, owners_of
from .participants import Team
from .save.base_saves import drop_marks, places_of, set_mark
from .save.draft import formats_of
from .save.job import SaveJob, one_moment

logger = logging.getLogger("rec_sdk_torch.checkpoint")


class Saver:
    """Saves and loads the tables of a model: rows, optimizer states, steps and options, open accumulation windows.

    A model: a collection or a `TableBatchedEmbedding`, a module that has some, or what DistributedModelParallel made of
    one. All ranks that share sharded tables call `save` and `load` together, with one `path` that all of them see.

    Args:
        rank: of this process, as in Rec SDK; that of the process group when None.

    Raises:
        ValueError: no int, a negative one, or another than the process group says.

    Example:
        >>> import tempfile, torch
        >>> from rec_sdk_torch import Saver, TableBatchedEmbedding, TableConfig, TableOptimizer
        >>> def make():
        ...     sgd = TableOptimizer.create(torch.optim.SGD, {"lr": 0.1})
        ...     return TableBatchedEmbedding([TableConfig("t", 100, 4, track_changes=True)], optimizer=sgd, cache=10)
        >>> model, folder = make(), tempfile.mkdtemp()
        >>> model(torch.tensor([7, -7]), torch.tensor([0, 2])).sum().backward()
        >>> path = Saver().save(model, folder)
        >>> model(torch.tensor([8]), torch.tensor([0, 1])).sum().backward()
        >>> path = Saver().save(model, folder, incremental=True)  # what has changed
        >>> again = make()
        >>> Saver().load(again, folder) == path
        True
        >>> sorted(again.table_ids("t").tolist())
        [-7, 7, 8]
    """

    def __init__(self, rank: int | None = None) -> None:
        if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int)):
            raise ValueError(f"rank is {rank!r}, expected an int")
        here = torch.distributed.get_rank() if torch.distributed.is_initialized() else None
        if rank is not None and (rank < 0 or rank != (rank if here is None else here)):
            raise ValueError(f"rank is {rank}, expected {'0 or more' if here is None else here}")
        self.rank = rank if rank is not None else (here or 0)

    @staticmethod
    def is_timestamp_format(dir_name: str) -> bool:
        """Whether a folder of this name holds a save: date and time, 14 digits, perhaps with a dot and 6 more."""
        return folders.is_timestamp(dir_name)

    @staticmethod
    def get_latest_load_path(path: Paths) -> str:
        """The latest complete save in the folder `path`, or in several.

        Raises:
            CheckpointError: there is none.
            ValueError: an empty sequence.
        """
        return str(folders.latest_save(path).resolve())

    @overload
    def save(
        self, module: torch.nn.Module, path: PathLike, incremental: bool = False, *, background: Literal[False] = False
    ) -> str: ...

    @overload
    def save(
        self, module: torch.nn.Module, path: PathLike, incremental: bool = False, *, background: Literal[True]
    ) -> Future[str]: ...

    def save(
        self, module: torch.nn.Module, path: PathLike, incremental: bool = False, *, background: bool = False
    ) -> str | Future[str]:
        """Writes one moment of all tables of `module` to a new folder in `path`, and returns that folder.

        The moment is when this is called, or when an earlier save of the model is written, for which it waits. Batches
        may be in flight, windows open, others prefetched: rows are as the latest backward pass left them. While the
        rows are written other threads may train. The old one of a row that is about to change is put aside before.

        Args:
            module: the model.
            path: a folder for the saves of one job; made when it is not there.
            incremental: only rows that changed since the save that it follows, and the ids that were removed since.
                That is the last save of this model in `path`, where that and all that it follows lie there; or else the
                last one that this model was saved to or loaded from, in any folder. A full save where there is none.
            background: return as soon as the moment is taken, and write in a thread of its own. The result
                is then a `concurrent.futures.Future` of the folder, whose `result` also raises what went wrong. At
                its end the interpreter waits for it.

        Raises:
            TypeError: a `path` that is none.
            ValueError: no module, or one without tables; `incremental` for tables that do not keep what changed; some
                tables are sharded and others not, of which each rank has rows of its own.
            CheckpointError: another process saves to `path` now.
            OSError: a file cannot be written; earlier saves are as before.
            MemoryError, RuntimeError: no thread can be started; earlier saves are as before.
        """
        with calls:
            root = folders.path_of(path).resolve()
            if not background:
                return _run(SaveJob(module, root, incremental))
            future: Future[str] = Future()
            future.set_running_or_notify_cancel()
            jobs: SimpleQueue[SaveJob | None] = SimpleQueue()
            work = functools.partial(_run_next, jobs, future)
            # Before the job has locks, which would stay if no thread could be started.
            thread = OwnThread(work, "rec_sdk_torch save", stop=lambda: None, daemon=False)
            job = None
            try:
                thread.start()
                job = SaveJob(module, root, incremental)
            finally:
                jobs.put(job)
            return future

    def load(self, module: torch.nn.Module, path: Paths, incremental: bool = False, *, warm: bool = True) -> str:
        """Makes the tables of `module` what the latest save in `path`, or the save `path`, has of them.

        Saves that it follows are looked for beside it, in the folders of `path`, in those that this model was saved to
        or loaded from, and where they were when the save was written, seen from its own folder.

        Cache size, device, data type, prefetching and the number of ranks may be others than those of the model that
        was saved. With another optimizer only weights are loaded, and a warning says so.

        Args:
            module: the model; optimizers have to be applied, if it is to train.
            path: what `save` was given, or what it returned; or several of these, of which the latest save is loaded;
                or a save of Rec SDK's, which has no steps and options.
            incremental: of a save of Rec SDK's: its rows are written over those of the tables, in which all others
                stay. A save of this package is read with all that it follows either way.
            warm: fill the device caches with the rows that were hot when the save was made, as many as fit. Without,
                they are empty, and the first steps miss every row.

        Returns:
            The save that was loaded.

        Raises:
            CheckpointError: a file is missing, damaged or of something else; the model is as it was.
            CapacityError, MemoryError, OSError: more rows than fit; the model is as it was.
            RuntimeError: batches are in flight; the model is as it was.
            ValueError: an empty sequence.
        """
        with calls:
            folder = _load(module, path, incremental, warm)
            logger.info("loaded %s", folder)
            return folder


def _load(module: torch.nn.Module, path: Paths, incremental: bool, warm: bool) -> str:
    owners = owners_of(module)
    team, paths = Team(owners), folders.paths_of(path)
    foreign = team.first(lambda: _foreign(paths), "which save is loaded")
    if foreign is not None:
        return _load_rec_sdk(owners, team, foreign, incremental, warm)
    folder = team.first(lambda: folders.latest_save(paths).resolve(), "which save is loaded")
    known = [Path(each) for owner in owners for place in places_of(owner.embedding) for each in place.folders]
    also = team.first(lambda: [*(each.resolve() for each in paths), *known], "the folders of saves")
    chain: list[tuple[Path, Manifest]] = []

    def read() -> None:
        chain.extend(folders.chain_of(folder, also))
        match(owners, chain)
        verify(chain, team.rank, team.size)

    team.together(read, "whether a save is intact")
    with one_moment(owners):
        found = match(owners, chain)
        rows = team.together(lambda: check(found), "how many rows each rank loads")
        check_counts(found, rows)
        coming = list(zip((each.view for each in found), rows[team.rank], strict=True))
        beside = team.together(lambda: has_room_beside(coming, folder), "whether memory is free")[team.rank]
        warn_of_losses(found, *chain[-1])
        rounded = put_in_place(team, owners, replacements(owners, found, beside))
        last, of_chain = chain[-1][1], dict.fromkeys(str(each.parent) for each, _ in reversed(chain))
        place = Place(last.id, last.base, last.sequence, folder.name, tuple(of_chain))
        now = formats_of(owners)
        followed = not rounded and can_be_followed(found, last, now)
        for owner in owners:
            drop_marks(owner.embedding)
            alone = team.size == last.world_size == 1
            evicted = dict.fromkeys(owner.configs, next_serial()) if alone else {}
            version = versions(owner.embedding.layout)
            set_mark(owner.embedding, place, now if followed else None, version, evicted=evicted)
        if warm:
            warm_tables(found)
    return str(folder)


def _foreign(paths: Sequence[Path]) -> Path | None:
    """The save of Rec SDK's that is meant; None where there is none."""
    found = [folder for each in paths if (folder := rec_sdk.folder_of(each.resolve())) is not None]
    if found and len(paths) > 1:
        raise CheckpointError(f"{found[0]}: a save of Rec SDK's, which is loaded by itself, not beside other folders")
    return found[0] if found else None


def _load_rec_sdk(owners: Sequence[Owner], team: Team, folder: Path, incremental: bool, warm: bool) -> str:
    with one_moment(owners):
        found: list[Any] = []
        team.together(lambda: found.extend(rec_sdk.read(owners, folder)), "whether a save is intact")
        if incremental:
            team.together(lambda: rec_sdk.write_over(owners, found), "whether all ranks have loaded a save")
        else:
            beside = team.together(lambda: rec_sdk.has_room(found, folder), "whether memory is free")[team.rank]
            put_in_place(team, owners, rec_sdk.replacements(owners, found, beside))
        team.together(lambda: rec_sdk.put_lifecycle(found), "whether all ranks have loaded a save")
        for owner in owners:
            drop_marks(owner.embedding)
        if warm:
            warm_by_counts(owners)
    return str(folder)


def _run(job: SaveJob) -> str:
    folder = job.run()
    logger.info("saved %s", folder)
    return folder


def _run_next(jobs: SimpleQueue[SaveJob | None], future: Future[str]) -> None:
    """Runs a job that the queue gets; None: there is none."""
    job = jobs.get()
    if job is None:
        return
    # The caller waits until this thread runs, and then for the interpreter's lock, which a new thread keeps for 5 ms.
    time.sleep(0.001)
    try:
        folder = _run(job)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(folder)
