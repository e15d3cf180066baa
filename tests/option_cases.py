"""Every option of a table and of an embedding, and its expected value in copies, shards, saves and other modules.

The tests that read these tables fail until a new option has an entry for each of these cases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, TypeAlias

import torch
from torchrec import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_configs import DataType

import rec_sdk_torch as rst
from rec_sdk_torch.fbgemm import BoundsCheckMode as FbgemmBoundsCheckMode
from rec_sdk_torch.fbgemm import (
    CacheAlgorithm,
    ComputeDevice,
    EmbeddingLocation,
    OptimType,
    PoolingMode,
    SparseType,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from rec_sdk_torch.tbe import (
    BatchHint,
    BoundsCheckMode,
    EmbeddingOptions,
    Home,
    InitializerType,
    Pooling,
    TableBatchedEmbedding,
    TableConfig,
    TableLifecycle,
)

WORLD_SIZE = 2
SAME: Any = object()


@dataclass(frozen=True)
class Absent:
    """The option is not transferred: the result has the option's default, or the rows are loaded into tables
    without it.
    """

    why: str


@dataclass(frozen=True)
class Refused:
    """Tables with the option are refused with a RuntimeError."""

    message: str


@dataclass(frozen=True)
class Stored:
    """The option is stored in a state dict or a save, where this function finds it."""

    find: Callable[[Any], Any]


@dataclass(frozen=True)
class Replaced:
    """The option has another value in the result: a fixed value, or a value computed from the rank and its device."""

    value: Any


KEPT = Replaced(SAME)


@dataclass(frozen=True)
class Arguments:
    """Constructor arguments that set the option to its example value, or to another value.

    Attributes:
        arguments: arguments of FBGEMM's module or of a collection.
        table: fields of the table's config.
        config, collection: names of the classes of the config and the collection.
        value: the value that the option has with these arguments.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    table: Mapping[str, Any] = field(default_factory=dict)
    config: str = "EmbCacheEmbeddingBagConfig"
    collection: str = "EmbCacheEmbeddingBagCollection"
    value: Any = SAME


Rows: TypeAlias = Stored | Absent | Refused


@dataclass(frozen=True)
class Option:
    """An option with an example value that is not its default, and the expected results.

    Attributes:
        value: the example value.
        loaded: expectation after loading a state dict or a save of an embedding, or a pair of both.
        collection: the arguments in collections of Rec SDK and of this package.
        fbgemm: the arguments in FBGEMM's module.
        shard: expectation for the tables on one of two ranks, sharded by row.
        copy: expectation for a copy of an embedding and of a collection.
        beside: further fields of the table's config that the value requires.
        set_up: sets the option on an embedding or a collection, if the option is no constructor argument.
    """

    value: Any
    loaded: Rows | tuple[Rows, Rows]
    collection: Arguments
    fbgemm: Arguments | Absent
    _: KW_ONLY
    shard: Replaced = KEPT
    copy: Replaced = KEPT
    beside: Mapping[str, Any] = field(default_factory=dict)
    set_up: Callable[[Any], None] | None = None

    @property
    def state_dict(self) -> Rows:
        return self.loaded[0] if isinstance(self.loaded, tuple) else self.loaded

    @property
    def save(self) -> Rows:
        return self.loaded[1] if isinstance(self.loaded, tuple) else self.loaded


def expected(option: Option, answer: Arguments | Replaced, rank: int = 0, device: torch.device | None = None) -> Any:
    """Returns the expected value of the option; `rank` and `device` are the rank and device of the shard."""
    if answer.value is SAME:
        return option.value
    return answer.value(rank, device) if callable(answer.value) else answer.value


def ones(weight: torch.Tensor) -> torch.Tensor:
    return weight.fill_(1)


SCALER = torch.amp.GradScaler("cpu")
DRAWN = Absent("rows that are there have been drawn; the config of the model says how others are")
ZEROS = Absent("rows of FBGEMM's tables begin with zeros")
OF_MODEL = Absent("the model that loads has its own")
ROWS_ALONE = Absent("the rows equal any other choice")
NO_LIFE = Absent("ids of FBGEMM's tables are the rows, none of which comes or goes")


def of_table(**fields: Any) -> Arguments:
    return Arguments(table=fields)


def of_collection(**arguments: Any) -> Arguments:
    return Arguments(arguments)


TABLE: dict[str, Option] = {
    "name": Option(
        "other",
        (Stored(lambda state: next(iter(state)).split(".")[0]), Stored(lambda table: table.name)),
        of_table(name="other"),
        Arguments({"table_names": ["other"]}),
    ),
    "num_embeddings": Option(
        60,
        (Stored(lambda state: len(state["t.weight"])), Stored(lambda table: table.num_embeddings)),
        of_table(num_embeddings=60),
        Arguments({"rows": 60}),
        beside={"hashed": False},
        shard=Replaced(30),
    ),
    "embedding_dim": Option(
        8,
        (Stored(lambda state: state["t.weight"].shape[1]), Stored(lambda table: table.embedding_dim)),
        of_table(embedding_dim=8),
        Arguments({"dim": 8}),
    ),
    # a shard has one feature per rank
    "num_features": Option(
        3,
        ROWS_ALONE,
        of_table(feature_names=["a", "b", "c"]),
        Arguments({"feature_table_map": [0, 0, 0]}),
        shard=Replaced(WORLD_SIZE),
    ),
    # the rank that has the bag pools its rows, so the shard returns single rows
    "pooling": Option(
        Pooling.MEAN,
        (ROWS_ALONE, Stored(lambda table: Pooling(table.pooling))),
        of_table(pooling=PoolingType.MEAN),
        Arguments({"pooling_mode": PoolingMode.MEAN}),
        shard=Replaced(Pooling.NONE),
    ),
    # a shard is a hash table, since the ids of a rank are not its row numbers
    "hashed": Option(
        False,
        (Stored(lambda state: "t.ids" in state), Stored(lambda table: table.hashed)),
        Arguments(config="EmbeddingBagConfig"),
        Arguments(),
        shard=Replaced(True),
    ),
    "capacity": Option(
        50,
        (ROWS_ALONE, Stored(lambda table: table.capacity)),
        Arguments(config="HashEmbeddingBagConfig", collection="HashEmbeddingBagCollection"),
        Absent("an index table has its number of rows"),
        shard=Replaced(25),
    ),
    "weight_dtype": Option(
        torch.bfloat16,
        (
            Stored(lambda state: state["t.weight"].dtype),
            Stored(lambda table: {"BF16": torch.bfloat16}[table.weight_dtype]),
        ),
        of_table(data_type=DataType.BF16),
        Arguments({"weights_precision": SparseType.BF16}),
    ),
    "initializer_type": Option(
        InitializerType.TRUNCATED_NORMAL, DRAWN, of_table(initializer_type=InitializerType.TRUNCATED_NORMAL), ZEROS
    ),
    "init_min": Option(-0.5, DRAWN, of_table(weight_init_min=-0.5), Arguments(value=0.0)),
    "init_max": Option(0.5, DRAWN, of_table(weight_init_max=0.5), Arguments(value=0.0)),
    "init_mean": Option(0.25, DRAWN, of_table(weight_init_mean=0.25), ZEROS),
    "init_stddev": Option(0.5, DRAWN, of_table(weight_init_stddev=0.5), ZEROS),
    "init_fn": Option(ones, DRAWN, of_table(init_fn=ones), ZEROS),
    "track_changes": Option(True, ROWS_ALONE, of_table(is_incremental=True), Absent("FBGEMM has no saves of changes")),
    "stochastic_rounding": Option(
        True, ROWS_ALONE, of_collection(stochastic_rounding=True), Arguments({"stochastic_rounding": True})
    ),
    "padding_idx": Option(
        -1, ROWS_ALONE, of_collection(padding_idx=-1), Absent("FBGEMM's tables have a row for each id")
    ),
    "cache_dtype": Option(
        torch.bfloat16,
        ROWS_ALONE,
        of_collection(cache_dtype=torch.bfloat16),
        Arguments({"cache_precision": SparseType.BF16}),
    ),
    "lifecycle": Option(
        TableLifecycle(eviction=rst.rules.Idle(9), every=3, bound=rst.rules.Rows(40)),
        OF_MODEL,
        of_table(
            admit_and_evict_config=rst.AdmitAndEvictConfig(max_rows=40, evict_idle_steps=9, evict_step_interval=3)
        ),
        NO_LIFE,
        shard=Replaced(TableLifecycle(eviction=rst.rules.Idle(9), every=3, bound=rst.rules.Rows(20))),
    ),
    "home": Option(
        Home.HASH, ROWS_ALONE, of_collection(home="hash"), Absent("FBGEMM's module has all rows of its tables")
    ),
}
"""The fields of `TableConfig`."""

EMBEDDING: dict[str, Option] = {
    # rows of a rank; a hash table can have any number of them
    "cache": Option(
        {"t": 30},
        ROWS_ALONE,
        of_collection(cache={"t": 30}),
        Arguments({"cache_load_factor": 0.5}, value={"t": 25}),
    ),
    "batch_hint": Option(
        BatchHint(16, [2], 3),
        ROWS_ALONE,
        of_collection(batch_size=16, multi_hot_sizes=[2], world_size=3),
        Absent("FBGEMM's arguments say how large the cache is"),
    ),
    "device": Option(
        torch.device("meta"),
        (Stored(lambda state: state["t.weight"].device), Refused("meta device")),
        of_collection(device="meta"),
        Arguments({"device": "cpu"}, value=torch.device("cpu")),
        shard=Replaced(lambda rank, device: device),
    ),
    "bounds_check_mode": Option(
        BoundsCheckMode.FATAL,
        OF_MODEL,
        of_collection(bounds_check_mode="fatal"),
        Arguments({"bounds_check_mode": FbgemmBoundsCheckMode.FATAL}),
    ),
    "check_finite": Option(
        "raise", OF_MODEL, of_collection(check_finite="raise"), Absent("FBGEMM looks at no gradient")
    ),
    "cache_policy": Option(
        "lru",
        ROWS_ALONE,
        of_collection(cache_policy="lru"),
        Arguments({"cache_algorithm": CacheAlgorithm.LRU}),
    ),
    "update": Option("step", OF_MODEL, of_collection(update="step"), Absent("FBGEMM updates in the backward pass")),
    "host_store": Option(
        "store",
        ROWS_ALONE,
        of_collection(host_store="store"),
        Absent("FBGEMM keeps rows in memory"),
        copy=Replaced("store/copy1"),
        shard=Replaced(lambda rank, _: f"store/rank{rank}"),
    ),
    "evict_step_interval": Option(
        5, OF_MODEL, Arguments(), NO_LIFE, set_up=lambda tables: tables.set_evict_step_interval(5)
    ),
    "grad_scaler": Option(
        SCALER,
        OF_MODEL,
        Arguments(),
        Absent("FBGEMM's users scale gradients back themselves"),
        set_up=lambda tables: tables.set_grad_scaler(SCALER),
    ),
    "frozen": Option(
        frozenset({"t"}),
        OF_MODEL,
        Arguments(),
        Absent("FBGEMM's tables all train"),
        set_up=lambda tables: tables.freeze("t"),
    ),
    "grad_norms": Option(
        True,
        OF_MODEL,
        Arguments(),
        Absent("FBGEMM counts no norms"),
        set_up=lambda tables: tables.count_grad_norms(),
    ),
    "seed": Option(
        5,
        (OF_MODEL, Stored(lambda table: table.seed)),
        of_collection(seed=5),
        Arguments(value=lambda *_: torch.initial_seed()),
    ),
}
"""The fields of `EmbeddingOptions`."""

OPTIONS = {f"TableConfig.{name}": option for name, option in TABLE.items()} | {
    f"EmbeddingOptions.{name}": option for name, option in EMBEDDING.items()
}


def missing() -> list[str]:
    """Lists the options without an entry, and the entries without an option."""
    every = [f"{owner.__name__}.{each.name}" for owner in (TableConfig, EmbeddingOptions) for each in fields(owner)]
    return sorted(set(every) ^ set(OPTIONS))


def observed(name: str, embedding: TableBatchedEmbedding) -> Any:
    """Returns the value of an option in an embedding with one table."""
    owner, _, attribute = name.partition(".")
    return getattr(embedding.tables[0] if owner == "TableConfig" else embedding.options, attribute)


def default_of(name: str) -> Any:
    owner, _, attribute = name.partition(".")
    own = fields(TableConfig if owner == "TableConfig" else EmbeddingOptions)
    return next(each.default for each in own if each.name == attribute)


def make_embedding(name: str, *, without: bool = False) -> TableBatchedEmbedding:
    """Builds an embedding of one table with the option set, or with the option's default if `without` is true."""
    option = OPTIONS[name]
    owner, _, attribute = name.partition(".")
    table: dict[str, Any] = {"name": "t", "num_embeddings": 50, "embedding_dim": 4, **option.beside}
    options: dict[str, Any] = {"seed": 3}
    if not without:
        if owner == "TableConfig":
            table[attribute] = option.value
        elif option.set_up is None:
            options[attribute] = option.value
    embedding = TableBatchedEmbedding([TableConfig(**table)], **options)
    if option.set_up is not None and not without:
        option.set_up(embedding)
    return embedding


def make_collection(name: str, classes: Any) -> Any:
    """Builds a collection with the option; `classes`: the module or object that holds the classes."""
    option, given = OPTIONS[name], OPTIONS[name].collection
    config = EmbeddingBagConfig if given.config == "EmbeddingBagConfig" else getattr(classes, given.config)
    table = {"name": "t", "num_embeddings": 50, "embedding_dim": 4, "feature_names": ["f"], **given.table}
    if option.beside.get("hashed") is False:
        config = EmbeddingBagConfig
    collection = getattr(classes, given.collection)(tables=[config(**table)], **given.arguments)
    if option.set_up is not None:
        option.set_up(collection)
    return collection


def make_fbgemm(given: Arguments) -> SplitTableBatchedEmbeddingBagsCodegen:
    """Builds FBGEMM's module with one cached table."""
    arguments = {
        "table_names": ["t"],
        "optimizer": OptimType.EXACT_SGD,
        "stochastic_rounding": False,
        **given.arguments,
    }
    rows, dim = arguments.pop("rows", 50), arguments.pop("dim", 4)
    spec = rows, dim, EmbeddingLocation.MANAGED_CACHING, ComputeDevice.CPU
    return SplitTableBatchedEmbeddingBagsCodegen([spec], **arguments)


def fill(embedding: TableBatchedEmbedding) -> None:
    """Writes twenty rows of numbers that every data type represents exactly."""
    config = embedding.tables[0]
    weight = torch.arange(20 * config.embedding_dim).view(20, config.embedding_dim) / 4
    embedding.view(config.name).write(torch.arange(20), {"weight": weight.to(config.weight_dtype)})
