"""Folders of saves: which are there, which is the latest, and which a delta needs."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ..warn import warn
from .errors import CheckpointError
from .manifest import MANIFEST, Manifest, read_manifest

TIMESTAMP, MICROSECONDS = "%Y%m%d%H%M%S", ".%f"
"""Names of folders of saves: UTC, 14 digits; of a second's later saves with a dot and the microseconds behind."""
UNFINISHED = ".saving-"
"""The name of a folder begins with this while its save is written."""
_NAME = re.compile(r"[0-9]{14}(\.[0-9]{6})?")


def is_timestamp(name: str) -> bool:
    """Whether a folder of this name holds a save: a date and time of 14 digits, perhaps with microseconds."""
    return _NAME.fullmatch(name) is not None and _time_of(name) is not None


def _time_of(name: str) -> datetime | None:
    try:
        return datetime.strptime(name, TIMESTAMP + (MICROSECONDS if "." in name else "")).replace(tzinfo=UTC)
    except ValueError:
        return None


def now() -> datetime:
    """The clock. A test replaces it."""
    return datetime.now(UTC)


def next_name(path: Path) -> str:
    """A name later than those of all saves in `path`, and not taken: the time.

    Where the latest save is named by a time to come, that plus a microsecond, with a warning: loads take the latest.

    Raises:
        CheckpointError: there is no later name.
    """
    latest = max((each.name for each in _complete(path)), default="")
    taken, time = {*os.listdir(path), latest}, now()
    for name in (time.strftime(TIMESTAMP), time.strftime(TIMESTAMP + MICROSECONDS)):
        if name > latest and name not in taken:
            return name
    of_latest = _time_of(latest) or time
    if of_latest > time + timedelta(seconds=1):
        warn(
            f"{path}: the save {latest} is named by a time to come, the clock says {time.strftime(TIMESTAMP)}: so that "
            "loads find the latest, saves are named behind it. Rename or remove it"
        )
    while name <= latest or name in taken:
        try:
            of_latest += timedelta(microseconds=1)
        except OverflowError:
            raise CheckpointError(f"{path}: no name is later than {latest}: rename or remove it") from None
        name = of_latest.strftime(TIMESTAMP + MICROSECONDS)
    return name


def _complete(path: Path) -> list[Path]:
    """The complete saves in the folder `path`, in no order."""
    return [each for each in path.iterdir() if is_timestamp(each.name) and (each / MANIFEST).exists()]


def saves_in(path: Path) -> list[Path]:
    """The complete saves in the folder `path`, oldest first; `path` itself when it is one.

    Raises:
        CheckpointError: there is no such folder, or it cannot be read.
    """
    path = Path(path)
    try:
        if (path / MANIFEST).exists():
            return [path]
        if not path.is_dir():
            raise CheckpointError(f"{path}: there is no such folder")
        return sorted(_complete(path))
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read: {error.strerror}") from error


def latest_save(path: Path) -> Path:
    """The latest complete save in `path`, or `path` itself when it is one.

    Raises:
        CheckpointError: there is none.
    """
    saves = saves_in(path)
    if not saves:
        raise CheckpointError(f"{path}: holds no save, that is no folder named by date and time with a {MANIFEST}")
    return saves[-1]


def chain_of(save: Path) -> list[tuple[Path, Manifest]]:
    """The saves that make up the state of `save`: the full one first, then deltas in order, `save` last.

    They are looked for beside it.

    Raises:
        CheckpointError: one is missing or damaged, or the chain is not in order.
    """
    last = read_manifest(save)
    found = {last.id: (Path(save), last)}
    damaged = []
    if last.previous is not None:
        for folder in saves_in(Path(save).resolve().parent):
            try:
                manifest = last if folder.resolve() == Path(save).resolve() else read_manifest(folder)
            except CheckpointError as error:
                damaged.append(str(error))
                continue
            if manifest.id in found and found[manifest.id][0].resolve() != folder.resolve():
                raise CheckpointError(f"{folder}: the same save as {found[manifest.id][0]}: remove one of them")
            found[manifest.id] = (folder, manifest)
    chain = [found[last.id]]
    while (previous := chain[0][1].previous) is not None:
        if previous not in found:
            also = f"; {damaged[0]}" if damaged else ""
            raise CheckpointError(
                f"{chain[0][0]}: a delta of the save {previous}, which is not in {Path(save).resolve().parent}{also}"
            )
        before = found[previous][1]
        if before.base != last.base or before.sequence + 1 != chain[0][1].sequence:
            raise CheckpointError(
                f"{chain[0][0]}: delta {chain[0][1].sequence} of the save {last.base} cannot follow "
                f"{found[previous][0]}, number {before.sequence} of {before.base}"
            )
        chain.insert(0, found[previous])
    return chain


# ---- whether a delta can follow a save: asked while training waits


@dataclass(frozen=True)
class _Link:
    """The part of a manifest, read once, that a chain needs.

    Attributes:
        stamp: of its file then: inode, size and time of its last change.
        id, previous, base, sequence: as in the manifest.
    """

    stamp: tuple[int, int, int]
    id: str
    previous: str | None
    base: str
    sequence: int


_links: dict[str, dict[str, _Link]] = {}
"""By the folder of saves and the name of one; manifests of long chains are not read again for every delta."""


def _stamp(root: str, name: str) -> tuple[int, int, int]:
    found = os.stat(os.path.join(root, name, MANIFEST))
    return found.st_ino, found.st_size, found.st_mtime_ns


def remember(save: Path, manifest: Manifest) -> None:
    """`manifest` is that of the save in the folder `save`.

    Raises:
        OSError: it is not there any more.
    """
    root = str(save.parent)
    link = _Link(_stamp(root, save.name), manifest.id, manifest.previous, manifest.base, manifest.sequence)
    _links.setdefault(root, {})[save.name] = link


def is_whole(path: Path, save: str) -> bool:
    """Whether the save of this id and all that it follows are in the folder `path`, with manifests in order."""
    root = str(path)
    known = _links.get(root, {})
    others = any(name not in known and is_timestamp(name) for name in os.listdir(root))
    return (not others and _follows(root, known, save)) or _follows(root, _read_links(path), save)


def _read_links(path: Path) -> dict[str, _Link]:
    """The links of the saves in `path`, whose manifests are read where they are not those that are known."""
    root = str(path)
    known = _links.pop(root, {})
    for folder in saves_in(path):
        with contextlib.suppress(CheckpointError, OSError):
            if folder.name in known and known[folder.name].stamp == _stamp(root, folder.name):
                _links.setdefault(root, {})[folder.name] = known[folder.name]
            else:
                remember(folder, read_manifest(folder))
    return _links.get(root, {})


def _follows(root: str, links: dict[str, _Link], save: str) -> bool:
    """The same with these saves, where they are what they were."""
    of_ids: dict[str, list[tuple[str, _Link]]] = {}
    for name, link in links.items():
        of_ids.setdefault(link.id, []).append((name, link))
    wanted: str | None = save
    later: _Link | None = None
    while wanted is not None:
        found = of_ids.get(wanted, ())
        if len(found) != 1:  # two folders with one save: it is not known which of them is meant
            return False
        name, link = found[0]
        try:
            same = _stamp(root, name) == link.stamp
        except OSError:
            return False
        if not same or (later is not None and (link.base, link.sequence + 1) != (later.base, later.sequence)):
            return False
        wanted, later = link.previous, link
    return True
