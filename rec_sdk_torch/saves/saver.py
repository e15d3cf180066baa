"""`Saver` writes the tables of a model to a folder and loads them."""

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
from ..tbe import next_serial, start_versions
from .format import folders
from .format.errors import CheckpointError
from .format.folders import PathLike, Paths, SaveLocation
from .format.manifest import Manifest
from .load import rec_sdk
from .load.cache_warming import warm_by_counts, warm_tables
from .load.capacity import fits_beside_tables
from .load.loader import (
    can_be_base,
    check_fit,
    check_row_counts,
    make_replacements,
    replace_tables,
    warn_of_skipped_content,
)
from .load.save_reader import match_tables, verify_files
from .owners import TableOwner, table_owners
from .participants import Participants
from .save.base_saves import drop_base_saves, save_locations_of, set_base_save
from .save.draft import current_formats
from .save.job import SaveJob, exclusive_tables

logger = logging.getLogger("rec_sdk_torch.checkpoint")


class Saver:
    """Saver and loader of a model's tables: rows, optimizer states, steps, options and accumulation buffers.

    A model is a collection, a `TableBatchedEmbedding`, a module that contains some of these, or the result of
    DistributedModelParallel. All ranks that share sharded tables must call `save` and `load` together, with the same
    `path` on a shared file system.

    Args:
        rank: rank of this process, an option of Rec SDK; None uses the rank in the process group.

    Raises:
        ValueError: `rank` is not an int, is negative, or differs from the process group's.

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
        >>> path = Saver().save(model, folder, incremental=True)  # only changed rows
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
        """Returns whether a folder name has the form of a save's name: 14 digits, optionally with a dot and 6 more."""
        return folders.is_timestamp(dir_name)

    @staticmethod
    def get_latest_load_path(path: Paths) -> str:
        """Returns the latest complete save in the folder `path`, or in several folders.

        Raises:
            CheckpointError: there is no save.
            ValueError: the sequence of folders is empty.
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
        """Writes a consistent snapshot of all tables of `module` to a new folder in `path`, and returns that folder.

        The snapshot is taken during this call, once any earlier save of the model is complete. Batches may be in flight
        or prefetched, and accumulation buffers may be open; the rows are saved as the latest backward pass left them.
        Other threads may train while the rows are written: a row that is about to change is first copied to a
        copy-on-write buffer.

        Args:
            module: the model.
            path: folder for the saves of one job; it is created if it does not exist.
            incremental: save only the rows that changed and the ids that were removed since a base save. The base is
                the last save of this model in `path` if its whole chain is there, otherwise the save to which the model
                was last saved or from which it was last loaded, in any folder. Without a base, a full save is written.
            background: return once the snapshot is taken, and write the files in a thread. The result is then a
                `concurrent.futures.Future` whose `result()` returns the folder or raises the save's error. The
                interpreter does not exit before the save is complete.

        Raises:
            TypeError: `path` is not a path.
            ValueError: `module` is not a module, or has no tables; `incremental` is True but a table does not track
                changes; several ranks save together, but some tables are not sharded.
            CheckpointError: another process is saving to `path`.
            OSError: a file cannot be written; earlier saves are unchanged.
            MemoryError, RuntimeError: no thread can be started; earlier saves are unchanged.
        """
        with calls:
            root = folders.to_path(path).resolve()
            if not background:
                return _run(SaveJob(module, root, incremental))
            future: Future[str] = Future()
            future.set_running_or_notify_cancel()
            jobs: SimpleQueue[SaveJob | None] = SimpleQueue()
            work = functools.partial(_run_next, jobs, future)
            # The thread is started before the job is created. Without a thread, the job's locks would stay locked.
            thread = OwnThread(work, "rec_sdk_torch save", stop=lambda: None, daemon=False)
            job = None
            try:
                thread.start()
                job = SaveJob(module, root, incremental)
            finally:
                jobs.put(job)
            return future

    def load(self, module: torch.nn.Module, path: Paths, incremental: bool = False, *, warm: bool = True) -> str:
        """Replaces the tables of `module` by the latest save in `path`, or by the save `path`.

        The earlier saves of its chain are searched for in the same folder, in the folders of `path`, in folders that
        this model was saved to or loaded from, and in the folders that the save's manifest names.

        Cache size, device, data type, prefetching and the number of ranks may differ from the saved model. If the
        optimizer differs, only the weights are loaded, with a warning.

        If memory cannot hold the old and the new rows at the same time, the tables are emptied first, with a warning.
        Only in this case does a failed load leave the tables empty.

        Args:
            module: the model. To continue training, apply optimizers before the load.
            path: the argument or the result of `save`, or a sequence of these, from which the latest save is loaded.
                Also a save of Rec SDK, which has no optimizer steps and options.
            incremental: only for a save of Rec SDK: overwrite the rows that the save has, and keep all other rows of
                the tables. A save of this package is always loaded with its whole chain.
            warm: fill the device caches with rows that were cached when the save was made, as many as fit. If False,
                the caches start empty, and every row of the first batches is a miss.

        Returns:
            The folder of the save that was loaded.

        Raises:
            CheckpointError: a file is missing, damaged or does not fit the model; the model is unchanged.
            CapacityError, MemoryError, OSError: the save has more rows than fit; the model is unchanged.
            RuntimeError: batches are in flight; the model is unchanged.
            ValueError: the sequence of folders is empty.
        """
        with calls:
            folder = _load(module, path, incremental, warm)
            logger.info("loaded %s", folder)
            return folder


def _load(module: torch.nn.Module, path: Paths, incremental: bool, warm: bool) -> str:
    owners = table_owners(module)
    participants, paths = Participants(owners), folders.to_paths(path)
    rec_sdk_save = participants.run_on_first(lambda: _sole_rec_sdk_save(paths), "which save is loaded")
    if rec_sdk_save is not None:
        return _load_rec_sdk(owners, participants, rec_sdk_save, incremental, warm)
    folder = participants.run_on_first(lambda: folders.latest_save(paths).resolve(), "which save is loaded")
    known_folders = [
        Path(each) for owner in owners for location in save_locations_of(owner.embedding) for each in location.folders
    ]
    also = participants.run_on_first(
        lambda: [*(each.resolve() for each in paths), *known_folders], "the folders of saves"
    )
    chain: list[tuple[Path, Manifest]] = []

    def read() -> None:
        chain.extend(folders.chain_of(folder, also))
        match_tables(owners, chain)
        verify_files(chain, participants.rank, participants.size)

    participants.run_on_all(read, "whether a save is intact")
    with exclusive_tables(owners):
        matches = match_tables(owners, chain)
        rows = participants.run_on_all(lambda: check_fit(matches), "how many rows each rank loads")
        check_row_counts(matches, rows)
        row_counts = list(zip((each.view for each in matches), rows[participants.rank], strict=True))
        fits_beside = participants.run_on_all(lambda: fits_beside_tables(row_counts, folder), "whether memory is free")[
            participants.rank
        ]
        warn_of_skipped_content(matches, *chain[-1])
        rounded = replace_tables(participants, owners, make_replacements(owners, matches, fits_beside))
        last, chain_folders = chain[-1][1], dict.fromkeys(str(each.parent) for each, _ in reversed(chain))
        location = SaveLocation(last.id, last.base, last.sequence, folder.name, tuple(chain_folders))
        formats = current_formats(owners)
        exact = not rounded and can_be_base(matches, last, formats)
        for owner in owners:
            drop_base_saves(owner.embedding)
            # With several ranks, a load divides the evicted rows anew, in another order than in the save.
            single_rank = participants.size == last.world_size == 1
            evicted = dict.fromkeys(owner.configs, next_serial()) if single_rank else {}
            version = start_versions(owner.embedding.layout)
            set_base_save(owner.embedding, location, formats if exact else None, version, evicted=evicted)
        if warm:
            warm_tables(matches)
    return str(folder)


def _sole_rec_sdk_save(paths: Sequence[Path]) -> Path | None:
    """Returns the save of Rec SDK that `paths` name, or None if they name none."""
    found = [folder for each in paths if (folder := rec_sdk.find_save(each.resolve())) is not None]
    if found and len(paths) > 1:
        raise CheckpointError(f"{found[0]}: a save of Rec SDK must be the only path")
    return found[0] if found else None


def _load_rec_sdk(
    owners: Sequence[TableOwner], participants: Participants, folder: Path, incremental: bool, warm: bool
) -> str:
    with exclusive_tables(owners):
        found: list[Any] = []
        participants.run_on_all(lambda: found.extend(rec_sdk.read_tables(owners, folder)), "whether a save is intact")
        if incremental:
            participants.run_on_all(
                lambda: rec_sdk.overwrite_rows(owners, found), "whether all ranks have loaded a save"
            )
        else:
            fits_beside = participants.run_on_all(lambda: rec_sdk.fits_beside(found, folder), "whether memory is free")[
                participants.rank
            ]
            replace_tables(participants, owners, rec_sdk.make_replacements(owners, found, fits_beside))
        participants.run_on_all(lambda: rec_sdk.restore_lifecycle(found), "whether all ranks have loaded a save")
        for owner in owners:
            drop_base_saves(owner.embedding)
        if warm:
            warm_by_counts(owners)
    return str(folder)


def _run(job: SaveJob) -> str:
    folder = job.run()
    logger.info("saved %s", folder)
    return folder


def _run_next(jobs: SimpleQueue[SaveJob | None], future: Future[str]) -> None:
    """Runs the next job of the queue; does nothing if it is None, because the job could not be created."""
    job = jobs.get()
    if job is None:
        return
    # `save` has yet to return. The sleep gives its thread the interpreter lock, which this thread may keep for 5 ms.
    time.sleep(0.001)
    try:
        folder = _run(job)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(folder)
