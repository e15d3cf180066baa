"""Sharding types: which rank is home to an id of a table."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torchrec.distributed.types import ParameterSharding, ShardingType

from ..tbe.cache.batch import Int64Array


class Placement(abc.ABC):
    """Where the rows of one table live.

    Attributes:
        share: of the table that is at home on this rank, 0 to 1.
        home: the rank of all ids; None: an id is at home on rank `id % world_size`.
        name: what the ranks have to agree on.
        replicated: whether every rank is home to all ids, and `home` is this one.
    """

    name: str
    replicated = False
    share: float
    home: int | None

    @abc.abstractmethod
    def owner(self, ids: Int64Array) -> Int64Array:
        """The rank of each id, int64 `[n]`."""

    @abc.abstractmethod
    def rows(self, num_embeddings: int) -> Int64Array:
        """Ids of an index table whose home is this rank, int64 `[n]`."""

    @abc.abstractmethod
    def part(self, bound: int) -> int:
        """This rank's part of a bound of the whole table, at least 1."""

    def most_rows(self, num_embeddings: int) -> int:
        """Rows that are at home here of a table of `num_embeddings`, at least 1: every rank lays every table out."""
        return max(1, math.ceil(num_embeddings * self.share))


class RowWise(Placement):
    """Ids go to rank `id % world_size`, negative ones by floor."""

    name = ShardingType.ROW_WISE.value

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self.share, self.home = 1 / world_size, None

    def owner(self, ids: Int64Array) -> Int64Array:
        return np.mod(ids, self._world_size)

    def rows(self, num_embeddings: int) -> Int64Array:
        return np.arange(self._rank, num_embeddings, self._world_size, dtype=np.int64)

    def part(self, bound: int) -> int:
        return max(1, bound // self._world_size)


class TableWise(Placement):
    """All ids go to one rank."""

    def __init__(self, rank: int, home: int) -> None:
        self.name = f"{ShardingType.TABLE_WISE.value} on rank {home}"
        self.home, self._here = home, rank == home
        self.share = float(self._here)

    def owner(self, ids: Int64Array) -> Int64Array:
        return np.full(len(ids), self.home, np.int64)

    def rows(self, num_embeddings: int) -> Int64Array:
        return np.arange(num_embeddings if self._here else 0, dtype=np.int64)

    def part(self, bound: int) -> int:
        return bound


class Replicated(TableWise):
    """Every rank has the whole table, and updates it with the gradients of all."""

    replicated = True

    def __init__(self, rank: int) -> None:
        super().__init__(rank, home=rank)
        self.name = ShardingType.DATA_PARALLEL.value


SHARDING_TYPES = [ShardingType.ROW_WISE.value, ShardingType.TABLE_WISE.value, ShardingType.DATA_PARALLEL.value]


def placements_of(tables: Sequence[str], plan: Any, rank: int, world_size: int) -> list[Placement]:
    """The placement of each table by a sharding plan.

    Raises:
        ValueError: the plan lacks a table or has others, or a table has another sharding type or no such rank.
    """
    missing, unknown = sorted(set(tables) - set(plan)), sorted(set(plan) - set(tables))
    if missing or unknown:
        raise ValueError(f"the sharding plan lacks tables {missing} and has unknown ones {unknown}")
    return [_placement(table, plan[table], rank, world_size) for table in tables]


def _placement(table: str, sharding: ParameterSharding, rank: int, world_size: int) -> Placement:
    if sharding.sharding_type == ShardingType.ROW_WISE.value:
        return RowWise(rank, world_size)
    if sharding.sharding_type == ShardingType.TABLE_WISE.value:
        ranks = sharding.ranks or []
        if len(ranks) != 1 or not 0 <= ranks[0] < world_size:
            raise ValueError(f"table {table!r}: table_wise on ranks {ranks}, expected one of 0 to {world_size - 1}")
        return TableWise(rank, ranks[0])
    if sharding.sharding_type == ShardingType.DATA_PARALLEL.value:
        return Replicated(rank)
    raise ValueError(f"table {table!r}: sharding type {sharding.sharding_type!r}, allowed are {SHARDING_TYPES}")
