"""All changes of the file system that a save makes: a test that plants failures here meets each of them. Files of
a save, which any user may have written, are opened here too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from ...runtime.forks import close_in_children


def before_change(call: str, path: Path) -> None:
    """Runs before every call that changes something; a test replaces it. `call`: its name, such as "write"."""


class NewFile:
    """A file that did not exist, open for writing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        before_change("create", path)
        self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)

    def write_at(self, data: bytes | memoryview, offset: int) -> None:
        """Writes all of `data`."""
        rest = memoryview(data)
        while rest:
            before_change("write", self.path)
            count = os.pwrite(self._fd, rest, offset)
            rest, offset = rest[count:], offset + count

    def sync(self) -> None:
        """Returns when what was written is on the disk."""
        before_change("sync", self.path)
        os.fsync(self._fd)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def write_file(path: Path, data: bytes) -> None:
    """Makes a file of `data`, on the disk when this returns."""
    file = NewFile(path)
    try:
        file.write_at(data, 0)
        file.sync()
    finally:
        file.close()


# ---- reading


def open_regular_file(path: Path, folder: Path | None = None) -> int:
    """Opens a plain file for reading; the caller closes it. Below `folder`, in which it lies, no link is followed.

    Raises:
        OSError: there is none, or it is a folder, a link or something that could make the caller wait.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    if folder is None:
        file = os.open(path, flags)
    else:
        *parents, last = path.relative_to(folder).parts
        parent = os.open(folder, flags | os.O_DIRECTORY)
        try:
            for part in parents:
                inner = _open_no_link(part, flags | os.O_DIRECTORY, parent, path)
                os.close(parent)
                parent = inner
            file = _open_no_link(last, flags, parent, path)
        finally:
            os.close(parent)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "no plain file", str(path))
    return file


def _open_no_link(name: str, flags: int, folder: int, path: Path) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        number, text = error.errno, error.strerror
        with contextlib.suppress(OSError):
            if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                number, text = errno.ELOOP, "a link, which is not followed"
        raise OSError(number, text, str(path)) from None


def read_regular_file(path: Path, folder: Path) -> bytes:
    """All of a file that `open_regular_file` opens.

    Raises:
        OSError: as there.
    """
    with open(open_regular_file(path, folder), "rb") as file:
        return file.read()


def is_regular_file(path: Path) -> bool:
    """Whether there is a file of this name.

    Raises:
        OSError: there is something else.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "no plain file", str(path))
    return True


# ---- changes


def ensure_folder(path: Path, *, sync: bool = True) -> None:
    """The folder and those above it that are missing; one that is there is no error.

    Without `sync` they may be missing after a crash, until the folders that they are in are synced.
    """
    if path.is_dir():
        return
    ensure_folder(path.parent, sync=sync)
    before_change("mkdir", path)
    path.mkdir(exist_ok=True)
    if sync:
        sync_folder(path.parent)


def create_folder(path: Path) -> None:
    """Makes a folder. After a crash it may be missing: a call that gives it its name in the end syncs that."""
    before_change("mkdir", path)
    path.mkdir()


def sync_folder(path: Path) -> None:
    """Returns when the names in the folder are on the disk."""
    before_change("sync", path)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def rename(source: Path, target: Path) -> None:
    """Gives a file or a folder another name; a file that had it is gone.

    Raises:
        OSError: of a folder: another one that is not empty has the name, or a file.
    """
    before_change("rename", target)
    source.rename(target)


def remove_tree(path: Path) -> None:
    """Removes a folder and all in it; what cannot be removed stays."""
    shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[bool]:
    """Holds the lock of a folder, which ends with the process; False: another process or thread holds it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    close = close_in_children(fd)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            acquired = True
        except BlockingIOError:
            acquired = False
        yield acquired
    finally:
        close()
