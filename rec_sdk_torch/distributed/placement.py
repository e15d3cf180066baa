"""Placements of sharded tables: rules for which rank owns each id."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torchrec.distributed.types import ParameterSharding, ShardingType

from .._engine import owner_ranks
from ..tbe import Home, Int64Array, TableConfig


class Placement(abc.ABC):
    """The placement of one table: the rule for which rank owns each of its ids.

    Attributes:
        share: fraction of the table's ids that this rank owns, 0 to 1.
        owner_rule: arguments of the engine's `owner_ranks`: the rank that owns all ids, or a negative number for a
            row-wise rule; and the block size of that rule.
        name: description of the placement, which must be the same on all ranks.
        replicated: whether every rank owns all ids; `owner_rule` is then this rank.
    """

    name: str
    replicated = False
    share: float
    owner_rule: tuple[int, int]
    _rank: int
    _world_size: int

    def owner(self, ids: Int64Array) -> Int64Array:
        """Returns the owner rank of each id, int64 `[n]`."""
        return owner_ranks(ids, self.owner_rule, self._world_size)

    def owns(self, ids: Int64Array) -> npt.NDArray[np.bool_]:
        """Returns which of `ids` this rank owns, bool `[n]`."""
        owned: npt.NDArray[np.bool_] = self.owner(ids) == self._rank
        return owned

    @abc.abstractmethod
    def local_ids(self, num_embeddings: int) -> Int64Array:
        """Returns the ids of an index table that this rank owns, int64 `[n]`."""

    @abc.abstractmethod
    def local_bound(self, bound: int) -> int:
        """Returns this rank's part, at least 1, of a limit on the number of rows of the whole table."""

    def max_own_rows(self, num_embeddings: int) -> int:
        """Returns the maximum number of rows that this rank owns of a table of `num_embeddings` rows.

        It is at least 1, because every rank allocates every table.
        """
        return max(1, math.ceil(num_embeddings * self.share))


_DEVIATIONS = 6
"""Standard deviations by which a rank's number of hashed ids may exceed the mean; more is improbable (1e-9)."""
_IDS_AT_ONCE = 1 << 20
"""Number of ids of an index table that are hashed in one call."""


class RowWise(Placement):
    """Row-wise placement: the table's option `home` determines the owner rank of each id."""

    name = ShardingType.ROW_WISE.value

    def __init__(self, rank: int, world_size: int, home: Home = Home.MODULO, num_embeddings: int = 1) -> None:
        """Creates the placement on this `rank` of a table with `num_embeddings` rows and the ownership rule `home`."""
        self._rank, self._world_size, self._home = rank, world_size, home
        self.share = 1 / world_size
        self._block = math.ceil(num_embeddings / world_size)
        self.owner_rule = {Home.MODULO: (-1, 0), Home.HASH: (-2, 0), Home.CONTINUOUS: (-3, self._block)}[home]

    def local_ids(self, num_embeddings: int) -> Int64Array:
        if self._home is Home.MODULO:
            return np.arange(self._rank, num_embeddings, self._world_size, dtype=np.int64)
        if self._home is Home.CONTINUOUS:
            first = min(self._rank * self._block, num_embeddings)
            return np.arange(first, min(first + self._block, num_embeddings), dtype=np.int64)
        begins = range(0, num_embeddings, _IDS_AT_ONCE)
        pieces = (np.arange(begin, min(begin + _IDS_AT_ONCE, num_embeddings), dtype=np.int64) for begin in begins)
        return np.concatenate([piece[self.owns(piece)] for piece in pieces])

    def local_bound(self, bound: int) -> int:
        return max(1, bound // self._world_size)

    def max_own_rows(self, num_embeddings: int) -> int:
        even = super().max_own_rows(num_embeddings)
        if self._home is not Home.HASH:
            return even
        return min(num_embeddings, even + math.ceil(_DEVIATIONS * math.sqrt(even * (1 - self.share))))


class TableWise(Placement):
    """Table-wise placement: one rank owns all ids."""

    def __init__(self, rank: int, home: int, world_size: int) -> None:
        self.name = f"{ShardingType.TABLE_WISE.value} on rank {home}"
        self.owner_rule, self._rank, self._world_size = (home, 0), rank, world_size
        self.share = float(rank == home)

    def local_ids(self, num_embeddings: int) -> Int64Array:
        return np.arange(num_embeddings if self.share else 0, dtype=np.int64)

    def local_bound(self, bound: int) -> int:
        return bound


class Replicated(TableWise):
    """Data-parallel placement: every rank has the whole table and updates it with the gradients of all ranks."""

    replicated = True

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, rank, world_size)
        self.name = ShardingType.DATA_PARALLEL.value


SHARDING_TYPES = [ShardingType.ROW_WISE.value, ShardingType.TABLE_WISE.value, ShardingType.DATA_PARALLEL.value]


def placements_of(tables: Sequence[TableConfig], plan: Any, rank: int, world_size: int) -> list[Placement]:
    """Returns the placement of each table in a sharding plan.

    Raises:
        ValueError: the plan lacks a table, has an unknown one, or gives a table an unsupported sharding type or a rank
            that does not exist.
    """
    names = {table.name for table in tables}
    missing, unknown = sorted(names - set(plan)), sorted(set(plan) - names)
    if missing or unknown:
        raise ValueError(f"the sharding plan lacks tables {missing} and has unknown ones {unknown}")
    return [_placement(table, plan[table.name], rank, world_size) for table in tables]


def _placement(table: TableConfig, sharding: ParameterSharding, rank: int, world_size: int) -> Placement:
    if sharding.sharding_type == ShardingType.ROW_WISE.value:
        return RowWise(rank, world_size, table.home, table.num_embeddings)
    if sharding.sharding_type == ShardingType.TABLE_WISE.value:
        ranks = sharding.ranks or []
        if len(ranks) != 1 or not 0 <= ranks[0] < world_size:
            raise ValueError(
                f"table {table.name!r}: table_wise on ranks {ranks}, expected one of 0 to {world_size - 1}"
            )
        return TableWise(rank, ranks[0], world_size)
    if sharding.sharding_type == ShardingType.DATA_PARALLEL.value:
        return Replicated(rank, world_size)
    raise ValueError(f"table {table.name!r}: sharding type {sharding.sharding_type!r}, allowed are {SHARDING_TYPES}")
