"""MovieLens-100K as a click log: a rating of four or five stars is a click."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from support.clicks import ClickData, JaggedIds
from support.errors import InputError
from support.hashing import hash_text
from support.movielens import Item, Rating, User, read_items, read_ratings, read_users
from torch import Tensor

AGE_BOUNDS = torch.tensor([18, 25, 35, 45, 50, 56])  # the age groups of MovieLens-1M
TYPICAL_YEAR = 1990  # the release year of items whose date is unknown


def _ids(values: Iterable[int]) -> JaggedIds:
    return JaggedIds.single(torch.tensor(list(values), dtype=torch.int64))


def _genres(items: list[Item]) -> JaggedIds:
    lengths = torch.tensor([len(item.genres) for item in items], dtype=torch.int64)
    return JaggedIds(torch.tensor([genre for item in items for genre in item.genres], dtype=torch.int64), lengths)


def _dense(users: list[User], items: list[Item]) -> Tensor:
    """Returns age, release year and gender, scaled to a magnitude of about one."""
    columns = [
        [user.age / 50.0 for user in users],
        [((item.year or TYPICAL_YEAR) - TYPICAL_YEAR) / 20.0 for item in items],
        [float(user.gender == "F") for user in users],
    ]
    return torch.tensor(columns).T.contiguous()


def _joined(folder: Path) -> tuple[list[Rating], list[User], list[Item]]:
    """Returns the ratings, with the user and the item of each rating."""
    ratings, users, items = read_ratings(folder), read_users(folder), read_items(folder)
    for rating in ratings:
        if rating.user not in users:
            raise InputError(f"{folder / 'u.user'}: user {rating.user} of u.data is missing")
        if rating.item not in items:
            raise InputError(f"{folder / 'u.item'}: item {rating.item} of u.data is missing")
    return ratings, [users[r.user] for r in ratings], [items[r.item] for r in ratings]


def movielens_clicks(folder: Path) -> ClickData:
    """Returns one sample for each rating."""
    ratings, users, items = _joined(folder)
    features = {
        "user": _ids(rating.user for rating in ratings),
        "item": _ids(rating.item for rating in ratings),
        "genre": _genres(items),
        "age": JaggedIds.single(torch.bucketize(torch.tensor([u.age for u in users]), AGE_BOUNDS, right=True)),
        "occupation": _ids(hash_text("occupation", user.occupation) for user in users),
        "zip": _ids(hash_text("zip", user.zip_code) for user in users),
    }
    labels = torch.tensor([float(rating.liked) for rating in ratings])
    return ClickData(_dense(users, items), features, labels)
