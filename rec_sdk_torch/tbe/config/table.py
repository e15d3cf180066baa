"""The description of a table, in terms of torch alone."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, unique
from typing import Any, TypeVar

import torch

from ...operators.record import WEIGHT_DTYPES, is_representable
from ...runtime.former_names import accepts_former_name
from ...runtime.numbers import as_int, is_number
from ...runtime.warn import InputWarning, warn
from .lifecycle import TableLifecycle

MAX_DIM = 4096
MAX_NAME_LENGTH = 100
MAX_DEVIATIONS = 37
"""A double has no probability of a normal that is farther from the mean."""
_NAME = re.compile(r"[A-Za-z0-9_]+")

InitFn = Callable[[torch.Tensor], object]


@unique
class InitializerType(Enum):
    """How a row's initial weight is drawn; docs/initializers.md has the formulas.

    LINEAR: from the least to the greatest by column, alike for every id. UNIFORM: between both. TRUNCATED_NORMAL: of a
    normal distribution, cut at both.

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
    """The result of the lookup of a bag: every row (NONE), their sum, or their mean.

    Example:
        >>> from rec_sdk_torch import Pooling
        >>> Pooling("mean")
        <Pooling.MEAN: 'mean'>
    """

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"


Choice = TypeVar("Choice", bound=Enum)


def _parse(choices: type[Choice], given: Choice | str, option: str) -> Choice:
    """The choice, or the one of this name; ValueError where `option` has no such one."""
    try:
        return choices(given.lower() if isinstance(given, str) else given)
    except ValueError:
        raise ValueError(f"{option} is {given!r}, allowed are {[each.value for each in choices]}") from None


@unique
class BoundsCheckMode(Enum):
    """The effect of an id outside `[0, num_embeddings)` of an index table, as in FBGEMM's TBE.

    FATAL raises IndexError; WARNING reads row 0 and warns; IGNORE reads row 0; NONE promises that there is
    no such id (one that comes all the same reads row 0).

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
        """The mode, or the one of this name.

        Raises:
            ValueError: there is none.
        """
        return _parse(cls, mode, "bounds_check_mode")


@unique
class Home(Enum):
    """Which rank is home to an id of a table that is divided row by row among W ranks.

    MODULO is `id % W`, by floor. HASH is a hash of the id: even loads for ids that have a stride. CONTINUOUS gives each
    rank a block of `ceil(num_embeddings / W)` ids, as TorchRec's row-wise tables have it; ids that are in no block are
    at home as by MODULO.

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
        """The home, or the one of this name.

        Raises:
            ValueError: there is none.
        """
        return _parse(cls, home, "home")


ENGINE = {"engine": True}
"""Marks a field that the engine's `TableSpec` takes by the same name."""

DIVIDED = {"divided": True}
"""Marks a number of rows, of which each rank of a sharded table has its part; 0 says nothing of them."""


@accepts_former_name("life", "lifecycle")
@dataclass(frozen=True)
class TableConfig:
    """One embedding table.

    Attributes:
        name: `[A-Za-z0-9_]+`, at most 100 characters.
        num_embeddings: rows of an index table; of a hash table the expected number of ids, which sizes cache
            and planner, sets the default of init_min and init_max, and is no limit.
        embedding_dim: D, 1 to 4096.
        num_features: features that look up this table.
        pooling: what a bag becomes.
        hashed: ids are any int64 (hash table), or `0 <= id < num_embeddings` (index table).
        capacity: a hash table refuses more ids than this; 0 for no limit.
        weight_dtype: float32, float16 or bfloat16; optimizer states are as `TableOptimizer` has them.
        initializer_type: how initial weights are drawn.
        init_min: the least. None: -sqrt(1 / num_embeddings); of a TRUNCATED_NORMAL two standard deviations below the
            mean.
        init_max: the greatest, likewise.
        init_mean: mean of a TRUNCATED_NORMAL.
        init_stddev: its standard deviation.
        init_fn: fills initial weights in place instead: an index table's whole `[num_embeddings, D]`, or a
            hash table's blocks of new rows `[n, D]` in order of arrival.
        lifecycle: which ids get a row, and when they lose it; hash tables. None: all do, and keep it.
        track_changes: rows know when they changed last, for `TableView.chunks(since=)`; 8 to 10 bytes per row.
        stochastic_rounding: updates round 16-bit weights up or down at random, so that they are right on average;
            see docs/rounding.md. float32 weights do not round.
        padding_idx: an id that means nothing: no row and no gradient, zeros in a sequence, not counted in a MEAN. Any
            int64; -1 is the id -1. None: there is none.
        cache_dtype: of the weights in the device cache, where lookups and updates are; float32, float16 or bfloat16.
            None: `weight_dtype`, which is that of the host's table. A weight that comes or goes is rounded to nearest.
        home: on which rank each row lives, where ranks divide the table row by row.

    Raises:
        ValueError, TypeError: a field out of range, or of another type; the message names table and field.

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
            object.__setattr__(self, name, value)  # an int, also where NumPy's was given
        if self.weight_dtype not in WEIGHT_DTYPES:
            raise ValueError(f"table {self.name!r}: data type {self.weight_dtype}, allowed are {WEIGHT_DTYPES}")
        if self.cache_dtype not in (None, *WEIGHT_DTYPES):
            raise ValueError(
                f"table {self.name!r}: cache_dtype {self.cache_dtype}, allowed are None and {WEIGHT_DTYPES}"
            )
        if self.lifecycle is not None and self.lifecycle.any() and not self.hashed:
            raise ValueError(
                f"table {self.name!r}: only a hash table admits or evicts ids, and hands out rows that leave"
            )
        if self.lifecycle is not None and not self._holds(self.lifecycle.default_value):
            default, dtypes = self.lifecycle.default_value, self._dtypes
            raise ValueError(f"table {self.name!r}: default_value is {default}, needs a finite one of {dtypes}")
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
        needs = f"needs finite ones of {self._dtypes}"
        if self.initializer_type is InitializerType.TRUNCATED_NORMAL:
            mean, stddev = self.init_mean, self.init_stddev
            fits = stddev >= 0 and self._holds(mean, low, high) and low <= high
            given = f"mean {mean} and stddev {stddev} from {low} to {high}, {needs}, stddev >= 0, min <= max"
            near = max(low - mean, mean - high) <= MAX_DEVIATIONS * stddev
            if fits and not near:
                raise ValueError(
                    f"table {self.name!r}: truncated_normal initial weights from {low} to {high} with mean {mean} and "
                    f"stddev {stddev}: the nearer bound is more than {MAX_DEVIATIONS} stddev from the mean"
                )
        else:
            fits = self._holds(low, high) and low <= high
            given = f"min {low} and max {high}, {needs}, min <= max"
        if not fits:
            raise ValueError(f"table {self.name!r}: {self.initializer_type.value} initial weights with {given}")

    def marked(self, mark: Mapping[str, bool]) -> dict[str, Any]:
        """The fields with a mark, by name."""
        return {name: getattr(self, name) for name in _marked(tuple(mark.items()))}

    @property
    def _dtypes(self) -> str:
        """The data types of its weights, for messages."""
        return " and ".join(dict.fromkeys(map(str, (self.weight_dtype, self.cached_dtype))))

    def _holds(self, *numbers: float) -> bool:
        """Whether they are finite weights."""
        return is_representable(self.weight_dtype, *numbers) and is_representable(self.cached_dtype, *numbers)

    @property
    def init_range(self) -> tuple[float, float]:
        """(min, max) of the initial weights."""
        normal = self.initializer_type is InitializerType.TRUNCATED_NORMAL
        middle, edge = (self.init_mean, 2 * self.init_stddev) if normal else (0.0, (1.0 / self.num_embeddings) ** 0.5)
        low = middle - edge if self.init_min is None else self.init_min
        return low, middle + edge if self.init_max is None else self.init_max

    @property
    def shard_init_range(self) -> tuple[float | None, float | None]:
        """`init_min` and `init_max` of a rank's part of the table, which has another `num_embeddings`."""
        return self._bounds if self.initializer_type is InitializerType.TRUNCATED_NORMAL else self.init_range

    @property
    def _bounds(self) -> tuple[float | None, float | None]:
        return self.init_min, self.init_max

    @property
    def initializer_kind(self) -> str:
        """The engine's name of the way in which initial weights are made."""
        normal = self.initializer_type is InitializerType.TRUNCATED_NORMAL
        return "bounded_normal" if normal and self._bounds != (None, None) else self.initializer_type.value

    @property
    def rounds_stochastically(self) -> bool:
        """Whether updates of its weights do."""
        return self.stochastic_rounding and self.cached_dtype is not torch.float32

    @property
    def cached_dtype(self) -> torch.dtype:
        """The data type of the weights in the device cache."""
        return self.cache_dtype or self.weight_dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of one row's weight."""
        return self.embedding_dim * self.weight_dtype.itemsize


@functools.cache
def _marked(mark: tuple[tuple[str, bool], ...]) -> tuple[str, ...]:
    """The names of the fields with a mark."""
    return tuple(each.name for each in fields(TableConfig) if dict(mark).items() <= each.metadata.items())


def check_names(tables: Sequence[TableConfig]) -> None:
    """Raises ValueError if there is no table, or two of one name."""
    if not tables:
        raise ValueError("at least one table is needed")
    seen: set[str] = set()
    for table in tables:
        if table.name in seen:
            raise ValueError(f"duplicate table name {table.name!r}")
        seen.add(table.name)


def warn_of_bounds(found: Sequence[tuple[str, int, int]]) -> None:
    """`found`: table, how many ids, one of them."""
    for name, count, example in found:
        warn(f"table {name!r}: {count} ids are out of range (such as {example}) and read row 0", InputWarning)
