"""Table configs: `TableConfig` and its enums, which depend on torch only."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, unique
from typing import Any, TypeVar

import torch

from ...operators.record import WEIGHT_DTYPES, is_representable
from ...runtime.former_names import accepts_former_members, accepts_former_name
from ...runtime.numbers import as_int, is_number
from ...runtime.warn import InputWarning, warn
from .lifecycle import TableLifecycle

MAX_DIM = 4096
MAX_NAME_LENGTH = 100
MAX_DEVIATIONS = 37
"""Maximum distance of a truncation bound from the mean, in standard deviations; beyond it, probabilities underflow."""
_NAME = re.compile(r"[A-Za-z0-9_]+")

InitFn = Callable[[torch.Tensor], object]


@unique
class InitializerType(Enum):
    """The distribution of a row's initial weights; see docs/initializers.md for the formulas.

    LINEAR: evenly spaced values from `init_min` to `init_max`, the same row for every id. UNIFORM: a uniform
    distribution between these bounds. TRUNCATED_NORMAL: a normal distribution truncated to these bounds.

    Example:
        >>> from rec_sdk_torch import InitializerType
        >>> InitializerType("uniform")
        <InitializerType.UNIFORM: 'uniform'>
    """

    LINEAR = "linear"
    TRUNCATED_NORMAL = "truncated_normal"
    UNIFORM = "uniform"


@unique
class Pooling(Enum):
    """The result of a bag's lookup: all of its rows (NONE), their sum or their mean.

    Example:
        >>> from rec_sdk_torch import Pooling
        >>> Pooling("mean")
        <Pooling.MEAN: 'mean'>
    """

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"


Choice = TypeVar("Choice", bound=Enum)


def _parse(choices: type[Choice], value: Choice | str, option: str) -> Choice:
    """Converts a member's name to the member; raises ValueError if there is none. `option` names it in the message."""
    try:
        return choices(value.lower() if isinstance(value, str) else value)
    except ValueError:
        raise ValueError(f"{option} is {value!r}, allowed are {[each.value for each in choices]}") from None


@unique
class BoundsCheckMode(Enum):
    """The effect of an id outside `[0, num_embeddings)` of an index table, as in FBGEMM's TBE.

    FATAL raises IndexError. WARNING reads row 0 and warns. IGNORE reads row 0. NONE is for callers that guarantee valid
    ids; an invalid id reads row 0 nevertheless.

    Example:
        >>> from rec_sdk_torch import BoundsCheckMode
        >>> BoundsCheckMode.parse("fatal")
        <BoundsCheckMode.FATAL: 'fatal'>
    """

    FATAL = "fatal"
    WARNING = "warning"
    IGNORE = "ignore"
    NONE = "none"

    @classmethod
    def parse(cls, mode: BoundsCheckMode | str) -> BoundsCheckMode:
        """Returns the mode with this name, whose case does not matter; a mode is returned unchanged.

        Raises:
            ValueError: there is no such mode.
        """
        return _parse(cls, mode, "bounds_check_mode")


@unique
class Home(Enum):
    """The owner rank of an id in a table that is sharded row by row over W ranks.

    MODULO: rank `id % W`, which is not negative. HASH: a hash of the id, which balances ids with a stride. CONTINUOUS:
    a block of `ceil(num_embeddings / W)` ids per rank, as in TorchRec's row-wise tables; outside all blocks, MODULO
    applies.

    Example:
        >>> from rec_sdk_torch import Home
        >>> Home.parse("hash")
        <Home.HASH: 'hash'>
    """

    MODULO = "modulo"
    HASH = "hash"
    CONTINUOUS = "continuous"

    @classmethod
    def parse(cls, home: Home | str) -> Home:
        """Returns the member with this name, whose case does not matter; a member is returned unchanged.

        Raises:
            ValueError: there is no such member.
        """
        return _parse(cls, home, "home")


ENGINE = {"engine": True}
"""Metadata of fields that the engine's `TableSpec` has under the same name."""

DIVIDED = {"divided": True}
"""Metadata of fields with a number of rows that is divided among the ranks of a sharded table, unless it is 0."""


@accepts_former_members(range_of_parts="shard_init_range")
@accepts_former_name("life", "lifecycle")
@dataclass(frozen=True)
class TableConfig:
    """The configuration of one embedding table.

    Attributes:
        name: `[A-Za-z0-9_]+`, at most 100 characters.
        num_embeddings: the number of rows of an index table. For a hash table, the expected number of ids, not a limit:
            it determines the sizes of cache and planner, and the defaults of init_min and init_max.
        embedding_dim: D, 1 to 4096.
        num_features: number of features that look up this table.
        pooling: the result of a bag's lookup.
        hashed: whether an id may be any int64 (hash table). False: `0 <= id < num_embeddings` (index table).
        capacity: maximum number of ids of a hash table, beyond which lookups raise CapacityError; 0 for no limit.
        weight_dtype: float32, float16 or bfloat16. For optimizer states see `TableOptimizer.state_dtypes`.
        initializer_type: the distribution of initial weights.
        init_min: minimum of the initial weights. None: -sqrt(1 / num_embeddings), or for a TRUNCATED_NORMAL two
            standard deviations below the mean.
        init_max: maximum of the initial weights. None: the counterpart of init_min.
        init_mean: mean of a TRUNCATED_NORMAL.
        init_stddev: standard deviation of a TRUNCATED_NORMAL.
        init_fn: a function that fills initial weights in place, instead of the initializer: `[num_embeddings, D]` for
            an index table, or `[n, D]` for n new rows of a hash table, in the order in which their ids first occur.
        lifecycle: admission and eviction of a hash table's ids. None: every id gets a row and keeps it.
        track_changes: whether the table records when each row changed last, for `TableView.chunks(since=)`; this takes
            8 to 10 bytes per row.
        stochastic_rounding: whether updates round 16-bit weights up or down at random, without bias; see
            docs/rounding.md. It has no effect on float32 weights.
        padding_idx: an id without a row or a gradient, which reads zeros in a sequence and does not count in a MEAN. It
            may be any int64: -1 is the id -1. None: no padding id.
        cache_dtype: data type of the weights in the device cache, which lookups and updates use: float32, float16 or
            bfloat16. None: `weight_dtype`, the data type in the host store. Copies between the two round to nearest.
        home: the owner rank of each row, if the table is sharded row by row.

    Raises:
        ValueError, TypeError: a field out of range or of the wrong type; the message names table and field.

    Example:
        >>> from rec_sdk_torch import Pooling, TableConfig
        >>> TableConfig("item", num_embeddings=100, embedding_dim=4, pooling=Pooling.MEAN).init_range
        (-0.1, 0.1)
    """

    name: str = field(metadata=ENGINE)
    num_embeddings: int = field(metadata=ENGINE | DIVIDED)
    embedding_dim: int
    num_features: int = 1
    pooling: Pooling = Pooling.SUM
    hashed: bool = field(default=True, metadata=ENGINE)
    capacity: int = field(default=0, metadata=ENGINE | DIVIDED)
    weight_dtype: torch.dtype = torch.float32
    initializer_type: InitializerType = InitializerType.UNIFORM
    init_min: float | None = None
    init_max: float | None = None
    init_mean: float = 0.0
    init_stddev: float = 0.05
    init_fn: InitFn | None = None
    track_changes: bool = False
    stochastic_rounding: bool = False
    padding_idx: int | None = None
    cache_dtype: torch.dtype | None = None
    lifecycle: TableLifecycle | None = None
    home: Home = Home.MODULO

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ValueError(f"table name {self.name!r}: letters, digits and underscores only")
        if len(self.name) > MAX_NAME_LENGTH:
            raise ValueError(f"table name {self.name!r}: {len(self.name)} characters, at most {MAX_NAME_LENGTH}")
        for name, low, top in (
            ("num_embeddings", 1, 2**32 - 2),
            ("embedding_dim", 1, MAX_DIM),
            ("num_features", 1, 2**31),
            ("capacity", 0, 2**32 - 2),
        ):
            value = as_int(getattr(self, name))
            if value is None or not low <= value <= top:
                raise ValueError(f"table {self.name!r}: {name} is {getattr(self, name)!r}, allowed are {low} .. {top}")
            object.__setattr__(self, name, value)  # a Python int, even if the user passed a NumPy int
        if self.weight_dtype not in WEIGHT_DTYPES:
            raise ValueError(f"table {self.name!r}: data type {self.weight_dtype}, allowed are {WEIGHT_DTYPES}")
        if self.cache_dtype not in (None, *WEIGHT_DTYPES):
            raise ValueError(
                f"table {self.name!r}: cache_dtype {self.cache_dtype}, allowed are None and {WEIGHT_DTYPES}"
            )
        if self.lifecycle is not None and self.lifecycle.any() and not self.hashed:
            raise ValueError(f"table {self.name!r}: admission, eviction and keep_evicted need a hash table")
        if self.lifecycle is not None and not self._holds(self.lifecycle.default_value):
            default, dtypes = self.lifecycle.default_value, self._dtypes
            raise ValueError(f"table {self.name!r}: default_value is {default}, must be finite in {dtypes}")
        if not isinstance(self.stochastic_rounding, bool):
            raise TypeError(
                f"table {self.name!r}: stochastic_rounding is {self.stochastic_rounding!r}, expected a bool"
            )
        if self.padding_idx is not None:
            padding = as_int(self.padding_idx)
            if padding is None or not -(2**63) <= padding < 2**63:
                raise ValueError(f"table {self.name!r}: padding_idx is {self.padding_idx!r}, expected an int64 or None")
            object.__setattr__(self, "padding_idx", padding)
        if not isinstance(self.home, Home):
            raise TypeError(f"table {self.name!r}: home is {self.home!r}, expected a Home")
        self._check_initializer()

    def _check_initializer(self) -> None:
        if self.init_fn is not None and not callable(self.init_fn):
            raise TypeError(
                f"table {self.name!r}: init_fn is {self.init_fn!r}, expected a function that fills a tensor"
            )
        for name in ("init_min", "init_max", "init_mean", "init_stddev"):
            value = getattr(self, name)
            if not is_number(value) and not (value is None and name in ("init_min", "init_max")):
                raise TypeError(f"table {self.name!r}: {name} is {value!r}, expected a number that a float can hold")
        low, high = self.init_range
        needs = f"must be finite in {self._dtypes}"
        if self.initializer_type is InitializerType.TRUNCATED_NORMAL:
            mean, stddev = self.init_mean, self.init_stddev
            fits = stddev >= 0 and self._holds(mean, low, high) and low <= high
            parameters = f"mean {mean} and stddev {stddev} from {low} to {high}, {needs}, stddev >= 0, min <= max"
            near = max(low - mean, mean - high) <= MAX_DEVIATIONS * stddev
            if fits and not near:
                raise ValueError(
                    f"table {self.name!r}: truncated_normal initial weights from {low} to {high} with mean {mean} and "
                    f"stddev {stddev}: the nearer bound is more than {MAX_DEVIATIONS} stddev from the mean"
                )
        else:
            fits = self._holds(low, high) and low <= high
            parameters = f"min {low} and max {high}, {needs}, min <= max"
        if not fits:
            raise ValueError(f"table {self.name!r}: {self.initializer_type.value} initial weights with {parameters}")

    def marked(self, mark: Mapping[str, bool]) -> dict[str, Any]:
        """Returns the values of the fields whose metadata has `mark`, by name."""
        return {name: getattr(self, name) for name in _marked(tuple(mark.items()))}

    @property
    def _dtypes(self) -> str:
        """Text for messages: the data types of the weights in the host store and in the cache."""
        return " and ".join(dict.fromkeys(map(str, (self.weight_dtype, self.cached_dtype))))

    def _holds(self, *numbers: float) -> bool:
        """Returns whether both weight data types represent all numbers as finite values."""
        return is_representable(self.weight_dtype, *numbers) and is_representable(self.cached_dtype, *numbers)

    @property
    def init_range(self) -> tuple[float, float]:
        """Minimum and maximum of the initial weights."""
        normal = self.initializer_type is InitializerType.TRUNCATED_NORMAL
        middle, edge = (self.init_mean, 2 * self.init_stddev) if normal else (0.0, (1.0 / self.num_embeddings) ** 0.5)
        low = middle - edge if self.init_min is None else self.init_min
        return low, middle + edge if self.init_max is None else self.init_max

    @property
    def shard_init_range(self) -> tuple[float | None, float | None]:
        """`init_min` and `init_max` for a shard, whose smaller `num_embeddings` must not change the initial range."""
        return self._bounds if self.initializer_type is InitializerType.TRUNCATED_NORMAL else self.init_range

    @property
    def _bounds(self) -> tuple[float | None, float | None]:
        return self.init_min, self.init_max

    @property
    def initializer_kind(self) -> str:
        """The engine's name of the initializer."""
        normal = self.initializer_type is InitializerType.TRUNCATED_NORMAL
        return "bounded_normal" if normal and self._bounds != (None, None) else self.initializer_type.value

    @property
    def rounds_stochastically(self) -> bool:
        """Whether updates of the cached weights round stochastically."""
        return self.stochastic_rounding and self.cached_dtype is not torch.float32

    @property
    def cached_dtype(self) -> torch.dtype:
        """Data type of the weights in the device cache."""
        return self.cache_dtype or self.weight_dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of one row's weight in the host store."""
        return self.embedding_dim * self.weight_dtype.itemsize


@functools.cache
def _marked(mark: tuple[tuple[str, bool], ...]) -> tuple[str, ...]:
    """Returns the names of the fields whose metadata has `mark`."""
    return tuple(each.name for each in fields(TableConfig) if dict(mark).items() <= each.metadata.items())


def check_names(tables: Sequence[TableConfig]) -> None:
    """Checks that there is at least one table, and that no two tables have the same name.

    Raises:
        ValueError: there is no table, or two tables have the same name.
    """
    if not tables:
        raise ValueError("at least one table is needed")
    names: set[str] = set()
    for table in tables:
        if table.name in names:
            raise ValueError(f"duplicate table name {table.name!r}")
        names.add(table.name)


def warn_of_bounds(out_of_range: Sequence[tuple[str, int, int]]) -> None:
    """Warns of out-of-range ids: (table, number of such ids, an example)."""
    for name, count, example in out_of_range:
        warn(f"table {name!r}: {count} ids are out of range (such as {example}) and read row 0", InputWarning)
