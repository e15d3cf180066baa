"""Lists the checkpoints in folders, finds the latest one, and finds the earlier saves that a delta builds on."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ...runtime.warn import SaveWarning, warn
from .errors import CheckpointError
from .manifest import MANIFEST, Manifest, read_manifest

TIMESTAMP, MICROSECONDS = "%Y%m%d%H%M%S", ".%f"
"""Folder names of saves: UTC, 14 digits. Later saves of the same second append a dot and microseconds."""
UNFINISHED = ".saving-"
"""Prefix of the folder name while the save is written."""
_NAME = re.compile(r"[0-9]{14}(\.[0-9]{6})?")


def is_timestamp(name: str) -> bool:
    """Returns whether a folder name is a date and time of 14 digits, optionally followed by a dot and microseconds."""
    return _NAME.fullmatch(name) is not None and _time_of(name) is not None


def _time_of(name: str) -> datetime | None:
    try:
        return datetime.strptime(name, TIMESTAMP + (MICROSECONDS if "." in name else "")).replace(tzinfo=UTC)
    except ValueError:
        return None


def now() -> datetime:
    """Returns the current UTC time. Tests replace it."""
    return datetime.now(UTC)


def next_name(path: Path, followed: Iterable[Path] = ()) -> str:
    """Returns the folder name of a new save: the current time, or the first free name after the latest save.

    Loads choose the save with the latest name, so the new name is later than the names of all saves in `path` and of
    the saves `followed`. If the latest save has the name of a future time, the new name is a microsecond later, and a
    warning is given.

    Raises:
        CheckpointError: no later name exists.
    """
    earlier = [*_complete_saves(path), *(save for save in followed if is_timestamp(save.name))]
    last = max(earlier, key=lambda save: save.name, default=path / "")
    latest = last.name if earlier else ""
    taken, time = {*os.listdir(path), latest}, now()
    for name in (time.strftime(TIMESTAMP), time.strftime(TIMESTAMP + MICROSECONDS)):
        if name > latest and name not in taken:
            return name
    next_time = _time_of(latest) or time
    if next_time > time + timedelta(seconds=1):
        warn(
            f"{last.parent}: the save {latest} is named by a future time, the clock says {time.strftime(TIMESTAMP)}: "
            "new saves get later names, so that loads find the latest. Rename or remove it",
            SaveWarning,
        )
    while name <= latest or name in taken:
        try:
            next_time += timedelta(microseconds=1)
        except OverflowError:
            raise CheckpointError(f"{last.parent}: no name is later than {latest}: rename or remove it") from None
        name = next_time.strftime(TIMESTAMP + MICROSECONDS)
    return name


def _complete_saves(path: Path) -> list[Path]:
    """Returns the complete saves in the folder `path`, unordered."""
    return [each for each in path.iterdir() if is_timestamp(each.name) and (each / MANIFEST).exists()]


def saves_in(path: Path) -> list[Path]:
    """Returns the complete saves in the folder `path`, oldest first, or `path` itself if it is a save.

    Raises:
        CheckpointError: the folder does not exist or cannot be read.
    """
    path = Path(path)
    try:
        if (path / MANIFEST).exists():
            return [path]
        if not path.is_dir():
            raise CheckpointError(f"{path}: there is no such folder")
        return sorted(_complete_saves(path))
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read: {error.strerror}") from error


PathLike = str | os.PathLike[str]
Paths = PathLike | Sequence[PathLike]


def to_path(path: PathLike) -> Path:
    """Converts a user's path argument to a Path.

    Raises:
        TypeError: the argument is not a path.
        ValueError: the path contains a null character.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path is {path!r}, expected the path of a folder of saves")
    result = Path(path)
    if "\0" in str(result):
        raise ValueError(f"path is {str(result)!r}, which has a null character")
    return result


def to_paths(path: Paths) -> tuple[Path, ...]:
    """Converts a user's path argument, one path or a sequence, to a tuple of paths.

    Raises:
        TypeError: an element is not a path.
        ValueError: the sequence is empty, or a path contains a null character.
    """
    if isinstance(path, str | bytes | os.PathLike) or not isinstance(path, Iterable):
        return (to_path(path),)
    result = tuple(map(to_path, path))
    if not result:
        raise ValueError("path is empty, expected a folder of saves, or several")
    return result


def latest_save(path: Paths) -> Path:
    """Returns the latest complete save in one or several folders, or `path` itself if it is a save.

    Raises:
        CheckpointError: a folder does not exist, or no folder holds a save.
        ValueError: the sequence of folders is empty.
    """
    folders = to_paths(path)
    saves = [found[-1] for each in folders if (found := saves_in(each))]
    if not saves:
        where = ", ".join(map(str, folders))
        raise CheckpointError(f"{where}: holds no save, that is no folder named by date and time with a {MANIFEST}")
    # `max` returns the first of several saves with equal names; reversed, this is the save in the last folder.
    return saves[0] if len(saves) == 1 else max(reversed(saves), key=lambda save: save.resolve().name)


def chain_of(save: Path, also: Iterable[Path] = ()) -> list[tuple[Path, Manifest]]:
    """Returns the chain of `save`: a full save, then the deltas up to and including `save`, in order.

    Earlier saves are searched for in the folder that contains `save`, in the folders `also`, and in the folders that
    the manifests of the deltas name.

    Raises:
        CheckpointError: a save is missing or damaged, or the chain is out of order.
    """
    save = Path(save)
    last = read_manifest(save)
    search = _Search([save.resolve().parent, *(each.resolve() for each in also)], {save.resolve(): last})
    chain = [(save, last)]
    while (previous := chain[0][1].previous) is not None:
        successor, manifest = chain[0]
        search.add(successor.resolve().parent, manifest.folders)
        folder, predecessor = search.find(previous, successor)
        if predecessor.base != last.base or predecessor.sequence + 1 != manifest.sequence:
            raise CheckpointError(
                f"{successor}: delta {manifest.sequence} of the save {last.base} cannot follow "
                f"{folder}, which is save {predecessor.sequence} of {predecessor.base}"
            )
        chain.insert(0, (folder, predecessor))
    return chain


class _Search:
    """Search for saves in several folders by the ids of the saves.

    Folders are read in order, each at most once; a search ends at the first folder that has the save.
    """

    def __init__(self, roots: Iterable[Path], known: dict[Path, Manifest]) -> None:
        """Creates a search that has read no folder yet.

        Args:
            roots: folders of saves, or saves; for a save, its parent folder is searched.
            known: manifests that have been read already, by save folder.
        """
        self._known = known
        self._roots = dict.fromkeys(each.parent if (each / MANIFEST).exists() else each for each in roots)
        self._found: dict[Path, list[tuple[Path, Manifest]]] = {}
        self._problems: list[str] = []

    def add(self, root: Path, folders: Iterable[str]) -> None:
        """Adds `folders`, which a manifest names relative to `root`, the parent folder of its save."""
        self._roots.update(dict.fromkeys(Path(os.path.normpath(root / each)) for each in folders))

    def find(self, save: str, successor: Path) -> tuple[Path, Manifest]:
        """Returns the folder and manifest of the save with the id `save`; `successor` is the delta that follows it.

        Raises:
            CheckpointError: no folder has the save, or one folder has two saves with this id.
        """
        for root in self._roots:
            found = [each for each in self._saves(root) if each[1].id == save]
            if len(found) > 1:
                raise CheckpointError(f"{found[1][0]}: the same save as {found[0][0]}: remove one of them")
            if found:
                return found[0]
        also = f"; {'; '.join(self._problems)}" if self._problems else ""
        raise CheckpointError(
            f"{successor}: a delta of the save {save}, which is not in {', '.join(map(str, self._roots))}{also}; "
            "if it is elsewhere, pass that folder too: load(model, [base, delta])"
        )

    def _saves(self, root: Path) -> list[tuple[Path, Manifest]]:
        if root not in self._found:
            found = self._found[root] = []
            try:
                folders = saves_in(root)
            except CheckpointError as error:
                self._problems.append(str(error))
                return found
            for folder in folders:
                try:
                    found.append((folder, self._known.get(folder.resolve()) or read_manifest(folder)))
                except CheckpointError as error:
                    self._problems.append(str(error))
        return self._found[root]


# ---- checks whether a delta can follow a save; training is paused meanwhile, so parsed manifests are cached


@dataclass(frozen=True)
class _ChainLink:
    """Cached fields of a manifest: the save's id and its position in a chain.

    Attributes:
        stamp: inode, size and modification time of the manifest file; if they are equal, the file is unchanged.
        id, previous, base, sequence: as in the manifest.
    """

    stamp: tuple[int, int, int]
    id: str
    previous: str | None
    base: str
    sequence: int


_links: dict[str, dict[str, _ChainLink]] = {}
"""Cached links by parent folder and name of the save, so that a delta need not read its chain's manifests again."""


def _manifest_stamp(root: str, name: str) -> tuple[int, int, int]:
    found = os.stat(os.path.join(root, name, MANIFEST))
    return found.st_ino, found.st_size, found.st_mtime_ns


def cache_chain_link(save: Path, manifest: Manifest) -> None:
    """Caches the fields of the manifest of `save` that describe its position in a chain.

    Raises:
        OSError: the manifest file no longer exists.
    """
    root = str(save.parent)
    link = _ChainLink(
        _manifest_stamp(root, save.name), manifest.id, manifest.previous, manifest.base, manifest.sequence
    )
    _links.setdefault(root, {})[save.name] = link


@dataclass(frozen=True)
class SaveLocation:
    """The id, chain position and folder of a save that a delta may follow.

    Attributes:
        save: id of the save.
        base: id of the full save at the beginning of its chain.
        sequence: position in the chain; 0 is the full save.
        name: name of its folder.
        folders: parent folders of all saves in its chain; the first is the parent folder of this save.
    """

    save: str
    base: str
    sequence: int
    name: str
    folders: tuple[str, ...]

    @property
    def path(self) -> Path:
        """The folder of the save."""
        return Path(self.folders[0], self.name)


def is_chain_intact(location: SaveLocation) -> bool:
    """Returns whether a save and all saves before it in its chain still exist, with consistent manifests."""
    try:
        known = [(root, _links.get(root, {})) for root in location.folders]
        unknown_saves = any(
            name not in links and is_timestamp(name) for root, links in known for name in os.listdir(root)
        )
        if not unknown_saves and _links_are_complete(known, location.save):
            return True
        return _links_are_complete([(root, _read_links(Path(root))) for root in location.folders], location.save)
    except (CheckpointError, OSError):  # a folder was removed or cannot be read
        return False


def _read_links(path: Path) -> dict[str, _ChainLink]:
    """Returns the links of all saves in `path`, by name; reads only manifests that are new or changed."""
    root = str(path)
    known = _links.pop(root, {})
    for folder in saves_in(path):
        with contextlib.suppress(CheckpointError, OSError):
            if folder.name in known and known[folder.name].stamp == _manifest_stamp(root, folder.name):
                _links.setdefault(root, {})[folder.name] = known[folder.name]
            else:
                cache_chain_link(folder, read_manifest(folder))
    return _links.get(root, {})


def _links_are_complete(roots: Sequence[tuple[str, dict[str, _ChainLink]]], save: str) -> bool:
    """Returns whether `save` and all saves before it are in `roots`, in order, and unchanged on disk.

    Args:
        roots: folders of saves, each with its cached links by save name.
        save: id of the last save of the chain.
    """
    by_id: dict[str, list[tuple[str, str, _ChainLink]]] = {}
    for root, links in roots:
        for name, link in links.items():
            by_id.setdefault(link.id, []).append((root, name, link))
    wanted: str | None = save
    successor: _ChainLink | None = None
    while wanted is not None:
        found = by_id.get(wanted, ())
        if not found or len({root for root, _, _ in found}) < len(found):
            return False  # no save has the id, or two saves in one folder have it, which is ambiguous
        root, name, link = found[0]
        try:
            same = _manifest_stamp(root, name) == link.stamp
        except OSError:
            return False
        if not same or (
            successor is not None and (link.base, link.sequence + 1) != (successor.base, successor.sequence)
        ):
            return False
        wanted, successor = link.previous, link
    return True
