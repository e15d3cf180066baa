"""Helpers that call the host engine, for several test files."""

from __future__ import annotations

from typing import Any

import numpy as np

from rec_sdk_torch import _engine
from rec_sdk_torch.tbe.cache.plan import PlanArrays

DIM = 4


def table(name: str = "t", hashed: bool = True, rows: int = 100, slots: int = 8, **other: Any) -> _engine.TableSpec:
    settings: dict[str, Any] = {
        "capacity": 0,
        "initializer": _engine.Initializer("uniform", -1.0, 1.0, 0.0, 1.0),
        "seed": 3,
        "state_init": [0.5],
        "bounds_check": "fatal",
    }
    settings.update(other)
    return _engine.TableSpec(name=name, hashed=hashed, num_embeddings=rows, slots=slots, **settings)


def engine(
    *tables: _engine.TableSpec, columns: list[int] | None = None, means: list[bool] | None = None, policy: str = "lru"
) -> Any:
    count = len(tables)
    return _engine.Engine(
        list(tables), DIM, 0, [DIM], list(range(count)), columns or [], means or [False] * count, policy
    )


def plan(
    e: Any,
    bags: list[list[int]],
    dtype: Any = np.int64,
    keys: list[int] | None = None,
    batch: int = 1,
    weighted: bool = False,
    joined: bool = False,
) -> Any:
    values = np.array([i for bag in bags for i in bag], dtype=dtype)
    offsets = np.cumsum([0] + [len(bag) for bag in bags]).astype(dtype)
    feature_keys = np.array(keys if keys is not None else range(len(bags) // batch), dtype=np.int64)
    return Planned(e.plan(values, offsets, feature_keys, batch, weighted, joined))


class Planned:
    """A plan of the engine, with its arrays as attributes."""

    def __init__(self, host: Any) -> None:
        self.host = host
        words = host.arena.view(np.int32)
        for name, field in zip(PlanArrays._fields, host.fields, strict=True):
            view = None if field is None else words[field[0] : field[0] + field[1]].view(TYPES.get(name, np.int32))
            if view is None and "_slots" in name:
                view = np.empty(0, np.int32)
            setattr(self, name, view)
        places = self.swap_out_places
        self.swap_out_slots = self.swap_in_slots[:0] if places is None else self.swap_in_slots[places >= 0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.host, name)


TYPES: dict[str, Any] = dict.fromkeys(("offsets", "window_out_slots", "window_in_slots", "unique_ids"), np.int64)
TYPES["scale"] = np.float32


def swap(e: Any, cache: np.ndarray, p: Any, sums: np.ndarray | None = None) -> None:
    leaving = np.ascontiguousarray(cache[p.swap_out_slots])
    rows = np.empty((len(p.swap_in_slots), e.record_bytes), np.uint8)
    e.read_in(p.host, rows)
    _engine.start_plans([p.host])
    cache[p.swap_in_slots] = rows
    e.applied(p.host)
    e.complete_write_back(p.host, leaving, sums)


def apply(e: Any, p: Any) -> Any:
    swap(e, np.zeros((1000, e.record_bytes), np.uint8), p)
    return p


def run(e: Any, bags: list[list[int]]) -> None:
    """Plans a batch, applies its swap and releases the plan."""
    apply(e, plan(e, bags)).release()


def records(e: Any, count: int) -> np.ndarray:
    return np.empty((count, e.record_bytes), np.uint8)
