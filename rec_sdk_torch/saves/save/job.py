"""One save, from the moment that it takes to the folder that it leaves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ..format import files
from ..format.errors import CheckpointError
from ..owners import Owner, owners_of
from ..participants import Team
from .draft import Start, keys_of
from .save_writer import Moment, begin, check_shared, check_tracked, finish, follows, manifest_of, note, take, write


class SaveJob:
    """A save whose moment is taken, and whose rows have yet to be written."""

    def __init__(self, module: torch.nn.Module, root: Path, incremental: bool) -> None:
        """Takes the moment. Ranks that share sharded tables do so together.

        Raises:
            ValueError, CheckpointError, OSError: as `Saver.save`.
        """
        self._owners = owners_of(module)
        if incremental:
            check_tracked(self._owners)
        self._root = root
        self._team = Team(self._owners)
        check_shared(self._owners, self._team.size)
        for owner in self._owners:
            owner.check_replicas()
        self._start: Start | None = None
        self._moment: Moment | None = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(_alone(self._owners))
            stack.enter_context(_held(self._team, root))
            stack.callback(self._give_up)
            self._take(incremental)
            # Later calls are from another thread, beside those of training.
            self._team = self._team.apart()
            self._stack = stack.pop_all()

    def _take(self, incremental: bool) -> None:
        owners, team, path = self._owners, self._team, str(self._root)
        with one_moment(owners):
            found = team.gather(follows(owners, path) if incremental else [], "the saves that a delta may follow")
            bases = [each for of_rank in found for each in of_rank]
            start = team.first(lambda: begin(self._root, bases), "the folder of a save")
            self._start = start

            def hold() -> None:
                self._moment = take(owners, keys_of(owners), start, team.rank)

            team.together(hold, "whether all ranks have begun a save")

    def run(self) -> str:
        """Writes the rows; the folder of the save. To be called once."""
        with self._stack:
            moment, start, team = self._moment, self._start, self._team
            assert moment is not None
            assert start is not None
            of_ranks = team.together(lambda: write(moment), "what each rank has written of a save")
            manifest = manifest_of(moment.draft, of_ranks)
            folder = team.first(lambda: finish(self._owners, self._root, start, manifest), "whether a save is complete")
            note(self._owners, folder, start, moment)
            self._start = None
        return str(folder)

    def _give_up(self) -> None:
        """Ends the save: nothing is kept aside any more, and files of a save that failed are removed."""
        if self._moment is not None:
            self._moment.close()
        if self._team.rank == 0 and self._start is not None:
            files.remove_tree(Path(self._start.folder))


@contextlib.contextmanager
def one_moment(owners: Sequence[Owner]) -> Iterator[None]:
    """Keeps other threads from all tables; always in one order, for two threads that save."""
    with contextlib.ExitStack() as stack:
        for owner in sorted(owners, key=lambda owner: id(owner.embedding)):
            stack.enter_context(owner.embedding.exclusive())
        yield


@contextlib.contextmanager
def _alone(owners: Sequence[Owner]) -> Iterator[None]:
    """Waits for other saves of these tables. It is a lock, since it ends in the thread that writes."""
    with contextlib.ExitStack() as stack:
        for owner in sorted(owners, key=lambda owner: id(owner.embedding)):
            stack.enter_context(owner.embedding.layout.locks.saving)
        yield


@contextlib.contextmanager
def _held(team: Team, root: Path) -> Iterator[None]:
    """Holds the lock of a folder of saves, on rank 0, for all ranks."""
    team.gather(None, "whether all ranks save")  # until then a rank that is late may remove the folder, as scripts do
    with contextlib.ExitStack() as stack:

        def hold() -> None:
            files.make_folder(root)
            if not stack.enter_context(files.held(root)):
                raise CheckpointError(f"{root}: another save is being written there now")

        team.first(hold, "the lock of a folder of saves")
        yield
