"""Readers of the files of MovieLens-100K (https://grouplens.org/datasets/movielens/100k/)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from support.errors import InputError, open_problem

GENRES = 19
T = TypeVar("T")
LIKED = 4  # ratings with at least this many stars count as clicks


@dataclass(frozen=True)
class Rating:
    """A line of u.data."""

    user: int
    item: int
    stars: int
    timestamp: int

    @property
    def liked(self) -> bool:
        """Whether the rating counts as a click, which is the label in both examples."""
        return self.stars >= LIKED


@dataclass(frozen=True)
class User:
    """A line of u.user."""

    user: int
    age: int
    gender: str
    occupation: str
    zip_code: str


@dataclass(frozen=True)
class Item:
    """A line of u.item."""

    item: int
    year: int | None  # release year; None if unknown
    genres: list[int]


def _rating(fields: list[str]) -> Rating:
    user, item, stars, timestamp = fields
    return Rating(int(user), int(item), int(stars), int(timestamp))


def _user(fields: list[str]) -> User:
    user, age, gender, occupation, zip_code = fields
    return User(int(user), int(age), gender, occupation, zip_code)


def _item(fields: list[str]) -> Item:
    item, _title, released, _video, _url, *flags = fields
    if len(flags) != GENRES:
        raise ValueError(f"{len(flags)} genre flags, not {GENRES}")
    genres = [genre for genre, flag in enumerate(flags) if flag == "1"]
    return Item(int(item), int(released[-4:]) if released else None, genres)


def _lines(path: Path, separator: str, parse: Callable[[list[str]], T]) -> Iterator[T]:
    try:
        text = path.read_text(encoding="latin-1")
    except OSError as error:
        raise open_problem(path, error) from error
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            yield parse(line.split(separator))
        except ValueError as error:
            raise InputError(f"{path}, line {number}: not a line of MovieLens-100K ({error})") from error


def read_ratings(folder: Path) -> list[Rating]:
    """Reads all ratings in the order of the file, which is random."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; --movielens takes the one that holds u.data, u.user and u.item")
    return list(_lines(folder / "u.data", "\t", _rating))


def read_users(folder: Path) -> dict[int, User]:
    """Reads the users, by number."""
    return {user.user: user for user in _lines(folder / "u.user", "|", _user)}


def read_items(folder: Path) -> dict[int, Item]:
    """Reads the items, by number."""
    return {item.item: item for item in _lines(folder / "u.item", "|", _item)}
