"""Runs one save: takes a snapshot of the tables, writes the files, and gives the folder its final name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ..format import files
from ..format.errors import CheckpointError
from ..owners import TableOwner, table_owners
from ..participants import Participants
from .draft import SaveIdentity, table_keys
from .save_writer import (
    ModelSnapshot,
    check_all_sharded,
    check_changes_tracked,
    complete_manifest,
    create_save_folder,
    possible_bases,
    publish_save,
    record_base_save,
    take_snapshot,
    write_snapshot,
)


class SaveJob:
    """A save in progress: the constructor takes the snapshot of the tables, and `run` writes it."""

    def __init__(self, module: torch.nn.Module, root: Path, incremental: bool) -> None:
        """Takes the snapshot. All ranks that share sharded tables must create the job at the same time (collective).

        Raises:
            ValueError, CheckpointError, OSError: see `Saver.save`.
        """
        self._owners = table_owners(module)
        if incremental:
            check_changes_tracked(self._owners)
        self._root = root
        self._participants = Participants(self._owners)
        check_all_sharded(self._owners, self._participants.size)
        for owner in self._owners:
            owner.check_replicas()
        self._identity: SaveIdentity | None = None
        self._snapshot: ModelSnapshot | None = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(_exclude_other_saves(self._owners))
            stack.enter_context(_locked_folder(self._participants, root))
            stack.callback(self._clean_up)
            self._take_snapshot(incremental)
            # `run` may exchange data in another thread while training exchanges data too, so it needs its own group.
            self._participants = self._participants.with_own_group()
            self._stack = stack.pop_all()

    def _take_snapshot(self, incremental: bool) -> None:
        owners, participants, path = self._owners, self._participants, str(self._root)
        with exclusive_tables(owners):
            by_rank = participants.gather(
                possible_bases(owners, path) if incremental else [], "the saves that a delta may follow"
            )
            bases = [base for rank_bases in by_rank for base in rank_bases]
            identity = participants.run_on_first(lambda: create_save_folder(self._root, bases), "the folder of a save")
            self._identity = identity

            def take() -> None:
                self._snapshot = take_snapshot(owners, table_keys(owners), identity, participants.rank)

            participants.run_on_all(take, "whether all ranks have begun a save")

    def run(self) -> str:
        """Writes the files and returns the folder of the save. It must be called exactly once."""
        with self._stack:
            snapshot, identity, participants = self._snapshot, self._identity, self._participants
            assert snapshot is not None
            assert identity is not None
            results = participants.run_on_all(lambda: write_snapshot(snapshot), "what each rank has written of a save")
            manifest = complete_manifest(snapshot.draft, results)
            folder = participants.run_on_first(
                lambda: publish_save(self._owners, self._root, identity, manifest), "whether a save is complete"
            )
            record_base_save(self._owners, folder, identity, snapshot)
            self._identity = None
        return str(folder)

    def _clean_up(self) -> None:
        """Releases the snapshot and, if the save failed, removes its files."""
        if self._snapshot is not None:
            self._snapshot.close()
        if self._participants.rank == 0 and self._identity is not None:
            files.remove_tree(Path(self._identity.folder))


@contextlib.contextmanager
def exclusive_tables(owners: Sequence[TableOwner]) -> Iterator[None]:
    """Excludes other threads from all tables. Locks are taken in a fixed order, so that two saves cannot deadlock."""
    with contextlib.ExitStack() as stack:
        for owner in sorted(owners, key=lambda owner: id(owner.embedding)):
            stack.enter_context(owner.embedding.exclusive())
        yield


@contextlib.contextmanager
def _exclude_other_saves(owners: Sequence[TableOwner]) -> Iterator[None]:
    """Blocks while another save of these tables runs, and excludes other saves for the `with` block.

    The locks may be released by another thread than the one that acquired them, such as the thread that writes.
    """
    with contextlib.ExitStack() as stack:
        for owner in sorted(owners, key=lambda owner: id(owner.embedding)):
            stack.enter_context(owner.embedding.layout.locks.saving)
        yield


@contextlib.contextmanager
def _locked_folder(participants: Participants, root: Path) -> Iterator[None]:
    """Locks a folder of saves for the `with` block; rank 0 acquires the lock for all ranks (collective)."""
    # Rank 0 creates the folder only once all ranks have called this: another rank's script may remove it before.
    participants.gather(None, "whether all ranks save")
    with contextlib.ExitStack() as stack:

        def lock() -> None:
            files.ensure_folder(root)
            if not stack.enter_context(files.folder_lock(root)):
                raise CheckpointError(f"{root}: another save is being written there now")

        participants.run_on_first(lock, "the lock of a folder of saves")
        yield
