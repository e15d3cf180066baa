"""MovieLens-100K as histories: from the films a user liked before, will the user like this one?"""

from __future__ import annotations

from collections import defaultdict, deque
from functools import partial
from pathlib import Path

import torch
from support.clicks import ClickData, JaggedIds
from support.movielens import read_ratings


def movielens_histories(folder: Path, longest: int) -> ClickData:
    """Returns one sample for each rating, in order of time, with the last `longest` films that the user liked."""
    liked: dict[int, deque[int]] = defaultdict(partial(deque, maxlen=longest))
    history: list[int] = []
    lengths: list[int] = []
    ratings = sorted(read_ratings(folder), key=lambda rating: rating.timestamp)
    for rating in ratings:
        before = liked[rating.user]
        history.extend(before)
        lengths.append(len(before))
        if rating.liked:
            before.append(rating.item)
    features = {
        "history": JaggedIds(torch.tensor(history, dtype=torch.int64), torch.tensor(lengths)),
        "candidate": JaggedIds.single(torch.tensor([rating.item for rating in ratings])),
    }
    labels = torch.tensor([float(rating.liked) for rating in ratings])
    return ClickData(torch.empty(len(ratings), 0), features, labels)
