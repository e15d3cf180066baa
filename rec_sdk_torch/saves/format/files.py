"""The file-system calls of checkpoints.

Every call that changes a file or folder goes through this module, so that tests can make each of these calls fail. A
checkpoint may come from another user; the functions that open its files follow no symbolic links.
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
from .errors import CheckpointError


def before_change(call: str, path: Path) -> None:
    """Does nothing. It is called before every change of the file system, and tests replace it to make changes fail.

    Args:
        call: name of the change, such as "write".
        path: path of the file or folder.
    """


class NewFile:
    """A new file, open for writing; creating it fails if the path exists."""

    def __init__(self, path: Path) -> None:
        self.path = path
        before_change("create", path)
        self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)

    def write_at(self, data: bytes | memoryview, offset: int) -> None:
        """Writes all of `data` at `offset`."""
        rest = memoryview(data)
        while rest:
            before_change("write", self.path)
            count = os.pwrite(self._fd, rest, offset)
            rest, offset = rest[count:], offset + count

    def sync(self) -> None:
        """Blocks until the written bytes are on disk."""
        before_change("sync", self.path)
        os.fsync(self._fd)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def write_file(path: Path, data: bytes) -> None:
    """Creates a file with the content `data`, and returns when it is on disk."""
    file = NewFile(path)
    try:
        file.write_at(data, 0)
        file.sync()
    finally:
        file.close()


# ---- reading


def open_regular_file(path: Path, folder: Path | None = None) -> int:
    """Opens a regular file for reading and returns its descriptor, which the caller closes.

    If `folder`, an ancestor of `path`, is given, no component of the path below it may be a symbolic link.

    Raises:
        OSError: the file is missing, or is a folder, a device or a pipe; or a component of the path is such a link.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # non-blocking, because opening a pipe could wait forever
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


def open_save_file(path: Path, folder: Path | None) -> int:
    """Opens a file of a save as `open_regular_file` does; raises CheckpointError if this fails."""
    try:
        return open_regular_file(path, folder)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error


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
    """Reads a whole file that `open_regular_file` accepts.

    Raises:
        OSError: the file is missing, is not a regular file, or a symbolic link below `folder` leads to it.
    """
    with open(open_regular_file(path, folder), "rb") as file:
        return file.read()


def is_regular_file(path: Path) -> bool:
    """Returns whether there is a regular file at this path.

    Raises:
        OSError: there is something else at this path, such as a folder.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "no plain file", str(path))
    return True


# ---- changes of files and folders


def ensure_folder(path: Path, *, sync: bool = True) -> None:
    """Creates the folder and its missing parents, unless it exists.

    Args:
        path: path of the folder.
        sync: whether to make the new folders durable at once. If False, a crash may lose them until their parent
            folders are synced.
    """
    if path.is_dir():
        return
    ensure_folder(path.parent, sync=sync)
    before_change("mkdir", path)
    path.mkdir(exist_ok=True)
    if sync:
        sync_folder(path.parent)


def create_folder(path: Path) -> None:
    """Creates a folder without syncing its parent; the caller syncs the parent after it has renamed the folder."""
    before_change("mkdir", path)
    path.mkdir()


def sync_folder(path: Path) -> None:
    """Blocks until the folder's entries (the names of its files) are on disk."""
    before_change("sync", path)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def rename(source: Path, target: Path) -> None:
    """Renames a file or a folder; an existing file at `target` is replaced by a file.

    Raises:
        OSError: `source` is a folder, and `target` is a file or a folder that is not empty.
    """
    before_change("rename", target)
    source.rename(target)


def remove_tree(path: Path) -> None:
    """Removes a folder and its contents; errors are ignored."""
    shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[bool]:
    """Locks a folder exclusively for the `with` block, without waiting; yields whether this succeeded.

    It yields False if another process or thread holds the lock. The system releases the lock if the process ends.
    """
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
