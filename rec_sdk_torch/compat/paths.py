"""`safe_makedirs` and `check_path`, which Rec SDK's scripts call around saves."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .constants import SAVE_PATH_MAX_LEN

_CHECKS = {"file_size_min", "file_size_max", "black_dirs", "sensitive_words"}


def safe_makedirs(path: str, mode: int = 0o750, exist_ok: bool = True) -> None:
    """Creates a folder and its missing parents, by default without access for users outside the owner's group.

    Raises:
        TypeError, ValueError: see `check_path`.
        FileExistsError: `path` is an existing file, or an existing folder while `exist_ok` is False.
    """
    check_path(path)
    missing = [folder for folder in (Path(path), *Path(path).parents) if not folder.exists()]
    for folder in reversed(missing):
        # os.makedirs would ignore `mode` for parent folders.
        folder.mkdir(mode=mode, exist_ok=exist_ok or folder != Path(path))
    if not missing:
        Path(path).mkdir(mode=mode, exist_ok=exist_ok)


def check_path(value: str, need_exist: bool = False, is_dir: bool = False, **kwargs: Any) -> None:
    """Checks a path before a save or load: its length, symbolic links, existence, file size and forbidden parts.

    Rec SDK also rejects system folders, words such as `Key`, and folders that other users can read. This function
    rejects only the folders and words that the caller passes as `black_dirs` and `sensitive_words`.

    Args:
        value: the path.
        need_exist: whether it must exist.
        is_dir: whether it must be an existing folder.
        kwargs: `file_size_min`, `file_size_max`: in bytes, 0 for no limit; `black_dirs`: folders that must not contain
            the path; `sensitive_words`: texts that the path must not contain.

    Raises:
        TypeError: `value` is not a string, or a keyword is unknown.
        ValueError: the path contains a symbolic link, or another check fails; the message names the failed check.
    """
    unknown = kwargs.keys() - _CHECKS
    if unknown:
        raise TypeError(f"check_path: unknown keywords {sorted(unknown)}; allowed are {sorted(_CHECKS)}")
    if not isinstance(value, str):
        raise TypeError(f"check_path: the path is {value!r}, expected a string")
    path, real = os.path.abspath(value), os.path.realpath(value)
    if not value or len(path) > SAVE_PATH_MAX_LEN:
        raise ValueError(f"check_path: {value!r} has {len(path)} characters, 1 to {SAVE_PATH_MAX_LEN} are allowed")
    if path != real:
        raise ValueError(f"check_path: {value!r} leads over a symbolic link to {real!r}, give that")
    _check_words(value, real, kwargs.get("black_dirs") or (), kwargs.get("sensitive_words") or ())
    if (need_exist or is_dir) and not os.path.exists(real):
        raise ValueError(f"check_path: {value!r} does not exist")
    if is_dir and not os.path.isdir(real):
        raise ValueError(f"check_path: {value!r} is no folder")
    if os.path.isfile(real):
        _check_size(value, kwargs.get("file_size_min") or 0, kwargs.get("file_size_max") or 0)


def _check_words(value: str, real: str, folders: Iterable[str], words: Iterable[str]) -> None:
    for folder in folders:
        if Path(real).is_relative_to(folder):
            raise ValueError(f"check_path: {value!r} is in {folder!r}, which black_dirs forbids")
    for word in words:
        if word in value:
            raise ValueError(f"check_path: {value!r} contains {word!r}, which sensitive_words forbids")


def _check_size(value: str, low: int, high: int) -> None:
    size = os.path.getsize(value)
    if size < low or (high and size > high):
        limits = f"{low} to {high}" if high else f"at least {low}"
        raise ValueError(f"check_path: {value!r} has {size} bytes, {limits} are allowed")
