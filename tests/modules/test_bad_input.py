"""Invalid input raises a helpful error, and the model still trains afterwards."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from batches import jagged, numbered, single_ids
from collection_factory import (
    EACH_KIND,
    Kind,
    apply,
    bag_config,
    bags_collection,
    capacity_collection,
    capacity_config,
    index_bag_config,
    index_sequence_config,
    sequence_config,
    sequences_collection,
)
from counts import exact_counts
from torchrec import KeyedJaggedTensor, PoolingType
from training import assert_trains, differing_tensors, read, rows_of, train, train_step

import rec_sdk_torch as rst
from rec_sdk_torch._engine import CacheTooSmallError
from rec_sdk_torch.serving import TableReader
from rec_sdk_torch.tbe import Pooling, TableBatchedEmbedding, TableConfig

HASHED = capacity_config("hashed", ["f"], num_embeddings=10)
PLAIN = index_bag_config(num_embeddings=10)


IDS = torch.tensor([1, 2, 3])


def batch_of(values: torch.Tensor, lengths: list[int] | None = None, **fields: Any) -> KeyedJaggedTensor:
    lengths_tensor = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    return KeyedJaggedTensor(**{"keys": ["f0"], "values": values, "lengths": lengths_tensor, **fields})


def starts(*offsets: int, device: str = "cpu") -> KeyedJaggedTensor:
    return batch_of(IDS, offsets=torch.tensor(offsets, device=device))


LENGTHS = "offsets|lengths"
BATCHES: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    ("float ids", lambda: batch_of(IDS.float(), [2, 1]), TypeError, r"ids are torch\.float32.*int32 or torch\.int64"),
    ("bool ids", lambda: batch_of(IDS.bool(), [2, 1]), TypeError, r"torch\.bool"),
    ("int16 ids", lambda: batch_of(IDS.short(), [2, 1]), TypeError, r"torch\.int16"),
    ("two-dimensional ids", lambda: batch_of(IDS[:, None], [2, 1]), ValueError, "flat"),
    ("lengths short of the ids", lambda: batch_of(IDS, [1, 1]), ValueError, LENGTHS),
    ("lengths beyond the ids", lambda: batch_of(IDS, [2, 2]), ValueError, LENGTHS),
    ("a negative length", lambda: batch_of(IDS, [4, -1]), ValueError, LENGTHS),
    (
        "lengths, keys",
        lambda: batch_of(IDS, [1] * 3, keys=["f0", "f1"]),
        ValueError,
        r"3 lengths, .* keys \(2\) times 1",
    ),
    ("huge lengths", lambda: batch_of(IDS, [2**31 - 1, 2**31 - 1]), ValueError, LENGTHS),
    ("offsets that start late", lambda: starts(1, 2, 3), ValueError, "offsets"),
    ("offsets that go back", lambda: starts(0, 2, 1, 3), ValueError, "offsets"),
    ("a missing feature", lambda: jagged({"other": [[1]]}), ValueError, r"lacks features \['f0'\].*'t0'.*'other'"),
    (
        "another number of lengths than a batch size per key says",
        lambda: batch_of(IDS, [1, 1, 1], stride_per_key_per_rank=[[2]]),
        ValueError,
        r"3 lengths, expected its keys \(1\) times 2",
    ),
    ("a batch on the meta device", lambda: batch_of(IDS, [2, 1]).to("meta"), ValueError, "ids are on the meta device"),
    ("meta offsets", lambda: starts(0, 2, 3, device="meta"), ValueError, "offsets are on the meta device"),
    ("no feature", lambda: batch_of(IDS[:0], [], keys=[]), ValueError, "'f0'"),
]


@EACH_KIND
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("batch", "error", "message"), [b[1:] for b in BATCHES], ids=[b[0] for b in BATCHES])
def test_invalid_batches_are_refused(
    device: torch.device, kind: Kind, training: bool, batch: Any, error: type[Exception], message: str
) -> None:
    collection = apply(kind.collection(device))
    train_step(collection, numbered(3))
    before, stats = collection.state_dict(), exact_counts(collection)
    collection.train(training)
    for _ in range(2):
        with pytest.raises(error, match=message):
            collection(batch())
    assert not list(differing_tensors(before, collection.state_dict()))
    assert exact_counts(collection) == stats
    assert_trains(collection.train())


@pytest.mark.parametrize("training", [True, False])
def test_a_first_batch_without_features(device: torch.device, training: bool) -> None:
    collection = apply(bags_collection(device)).train(training)
    with pytest.raises(ValueError, match=r"lacks features \['f0'\]"):
        collection(KeyedJaggedTensor.empty())
    assert_trains(collection.train())


@pytest.mark.parametrize("training", [True, False])
def test_sample_weights(device: torch.device, training: bool) -> None:
    collection = apply(bags_collection(device, is_weighted=True)).train(training)
    for weights, message in (
        (None, r"is_weighted=True.*no weights"),
        (torch.ones(3, device="meta"), "per-sample weights are on the meta device"),
        (torch.ones(2), "2 per-sample weights for 3 ids"),
        (torch.ones(4), "4 per-sample weights for 3 ids"),
    ):
        with pytest.raises(ValueError, match=message):
            collection(batch_of(IDS, [2, 1], weights=weights))
    assert collection.table_ids("t0").tolist() == []
    good = batch_of(IDS, [2, 1], weights=torch.tensor([1.0, 2.0, 3.0]))
    before = read(collection.train(), good)
    train_step(collection, good)
    moved = before - read(collection, good)
    torch.testing.assert_close(moved, torch.tensor([[0.5 * 5.0], [0.5 * 9.0]]).expand(2, 4))


OUTSIDE = jagged({"f0": [[3, 10], [-1], [4, 2**40]]})
ZEROED = jagged({"f0": [[3, 0], [0], [4, 0]]})


@pytest.mark.parametrize("mode", ["warning", "WARNING", "ignore", "none", rst.BoundsCheckMode.IGNORE])
@pytest.mark.parametrize("training", [True, False])
def test_out_of_range_ids_read_row_0(device: torch.device, mode: Any, training: bool) -> None:
    collection = apply(bags_collection(device, PLAIN, bounds_check_mode=mode, cache=8)).train(training)
    reference = apply(bags_collection(device, PLAIN)).train(training)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output = collection(OUTSIDE).values()
    assert len(caught) == (str(mode).lower() == "warning")
    assert all(part in str(each.message) for each in caught for part in ("'t0'", "3 ids", "row 0"))
    assert collection.cache_stats().get("bounds_errors", 0) == (3 if training else 0)
    expected = reference(ZEROED).values()
    assert torch.equal(output, expected)
    if training:
        (output + expected).sum().backward()
    assert not list(differing_tensors(collection.state_dict(), reference.state_dict()))


@pytest.mark.parametrize("mode", ["fatal", rst.BoundsCheckMode.FATAL])
@pytest.mark.parametrize("training", [True, False])
def test_out_of_range_ids_are_fatal(device: torch.device, mode: Any, training: bool) -> None:
    collection = apply(bags_collection(device, PLAIN, bounds_check_mode=mode)).train(training)
    before = collection.state_dict()
    for bad in ([3, 10], [-1], [2**40, 1]):
        with pytest.raises(IndexError, match=rf"'t0'.*{next(i for i in bad if not 0 <= i < 10)}.*10"):
            collection(single_ids(bad))
    assert not list(differing_tensors(before, collection.state_dict()))
    assert_trains(collection.train())


def test_hash_tables_have_no_range(device: torch.device) -> None:
    collection = apply(bags_collection(device, bounds_check_mode="fatal"))
    assert_trains(collection, ids=[-1, 2**63 - 1, -(2**63), 10**12, -1])


def test_a_cache_smaller_than_the_batch(device: torch.device) -> None:
    collection = apply(bags_collection(device, bag_config(), bag_config("t1", ["f1"]), cache={"t0": 4, "t1": 8}))
    for _ in range(3):
        with pytest.raises(CacheTooSmallError, match=r"'t0'.*5 distinct rows.*4 slots.*cache="):
            collection(jagged({"f0": [[1, 2, 3, 4, 5, 5]], "f1": [[9]]}))
    train(collection, [jagged({"f0": [[1, 2]], "f1": [[3]]}), jagged({"f0": [[6, 7, 8, 9]], "f1": [[9]]})])
    assert len(rows_of(collection)) == 6


def test_an_index_table_larger_than_the_host(device: torch.device) -> None:
    huge = {"num_embeddings": 2**31, "embedding_dim": 4096}  # 32 TiB of float32 weights
    with pytest.raises(MemoryError, match=rf"'huge'.*{2**31 * 4096 * 4} bytes.*free"):
        bags_collection(device, bag_config(), index_bag_config("huge", **huge))
    # A hash table of that size can be created, since it allocates memory only for the ids it contains.
    assert_trains(apply(bags_collection(device, bag_config(**huge), cache=4)))


def test_a_cache_larger_than_the_device(device: torch.device) -> None:
    config = bag_config(num_embeddings=2**31, embedding_dim=4096)
    for cache in (2**31, 1.0, {"t0": 1.0}):
        with pytest.raises(MemoryError, match=r"cache: \d+ bytes.*'t0'.*\d+ free.*cache="):
            read(bags_collection(device, config, cache=cache), numbered(2))


CACHES: list[tuple[Any, type[Exception], str]] = [
    (0, ValueError, "'t0'.*0 rows.*at least 1"),
    (-5, ValueError, "'t0'.*-5 rows"),
    (1.5, ValueError, r"'t0'.*1\.5.*\(0, 1\]"),
    (0.0, ValueError, r"'t0'.*0\.0.*\(0, 1\]"),
    (float("nan"), ValueError, r"'t0'.*nan.*\(0, 1\]"),
    (True, TypeError, "'t0'.*True"),
    ([3], TypeError, r"'t0'.*\[3\]"),
    ("lots", ValueError, "cache.*'lots'"),
    ("-1GiB", ValueError, "cache.*'-1GiB'"),
    ("0", ValueError, "cache.*'0'"),
    ("3 XB", ValueError, "cache.*'3 XB'"),
    ("", ValueError, "cache.*''"),
    ({"t7": 4}, ValueError, r"no table is named \['t7'\].*'t0'"),
    ({"t0": 0}, ValueError, "'t0'.*0 rows"),
    ({"t0": None}, TypeError, "'t0'.*None"),
    ({"t0": "x"}, ValueError, "'t0'.*'x'"),
    ("9" * 400, ValueError, "cache.*below 2.63, got '9{40}[.]{3}'"),
    (f"{2**63}", ValueError, "cache.*below 2.63"),
    ({"t0": "9" * 400 + "GiB"}, ValueError, "cache of table 't0'.*below 2.63"),
]


@pytest.mark.parametrize(("cache", "error", "message"), CACHES, ids=[str(c[0])[:40] for c in CACHES])
def test_invalid_cache_options_are_refused(
    device: torch.device, cache: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        bags_collection(device, cache=cache)


def test_a_cache_of_less_than_a_row(device: torch.device) -> None:
    """The size of a row record depends on the optimizer, so the error is raised at the first use."""
    for cache, message in (("10B", "cache='10B' allows 10 bytes"), ({"t0": "10B"}, "'t0'.*'10B'.*16 bytes")):
        with pytest.raises(ValueError, match=message):
            read(bags_collection(device, cache=cache), numbered(2))


@EACH_KIND
def test_duplicate_tables(device: torch.device, kind: Kind) -> None:
    with pytest.raises(ValueError, match="duplicate table name 't0'"):
        kind.collection(device, kind.config(), kind.config("t1"), kind.config())


def test_wrong_kind_of_table(device: torch.device) -> None:
    for config in (sequence_config(), index_sequence_config()):
        with pytest.raises(TypeError, match=rf"takes EmbeddingBagConfig tables, got {type(config).__name__}"):
            bags_collection(device, bag_config("other"), config)
        with pytest.raises(TypeError, match="HashEmbeddingBagCollection takes EmbeddingBagConfig"):
            capacity_collection(device, config)
    for bag in (bag_config(), PLAIN):
        with pytest.raises(TypeError, match=rf"takes EmbeddingConfig tables, got {type(bag).__name__}"):
            sequences_collection(device, bag)
    for odd in ("t0", None, {"name": "t0"}):
        for make in (bags_collection, capacity_collection):
            with pytest.raises(TypeError, match="takes EmbeddingBagConfig tables, got"):
                make(device, HASHED, odd) if make is capacity_collection else make(device, odd)


@pytest.mark.parametrize("odd", ["t0", None, HASHED, (table for table in [HASHED])], ids=lambda odd: type(odd).__name__)
def test_tables_that_are_no_list(device: torch.device, odd: Any) -> None:
    message = f"takes a list of EmbeddingBagConfig tables, got {type(odd).__name__}"
    for make in (rst.EmbCacheEmbeddingBagCollection, rst.HashEmbeddingBagCollection):
        with pytest.raises(TypeError, match=message):
            make(tables=odd, device=device)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("feature_names", "f0", "feature_names is 'f0', expected a list of the features' names"),
        ("feature_names", None, "feature_names is None, expected a list of the features' names"),
        ("init_fn", "zeros", "init_fn is 'zeros', expected a function that fills a tensor"),
        ("weight_init_min", "a", "init_min is 'a', expected a number"),
        ("weight_init_max", "a", "init_max is 'a', expected a number"),
        ("weight_init_mean", None, "init_mean is None, expected a number"),
        ("weight_init_stddev", "a", "init_stddev is 'a', expected a number"),
        ("weight_init_mean", 10**400, "init_mean is 10+, expected a number that a float can hold"),
        ("weight_init_max", torch.ones(2), "init_max is tensor.*, expected a number"),
    ],
)
def test_fields_of_the_wrong_type(device: torch.device, field: str, value: Any, message: str) -> None:
    config = bag_config()
    setattr(config, field, value)
    with pytest.raises(TypeError, match=f"table 't0': {message}"):
        bags_collection(device, config)


def test_no_table(device: torch.device) -> None:
    for make in (rst.EmbCacheEmbeddingBagCollection, rst.EmbCacheEmbeddingCollection, rst.HashEmbeddingBagCollection):
        with pytest.raises(ValueError, match="at least one table"):
            make(tables=[], device=device)


def test_unsupported_poolings_are_refused(device: torch.device) -> None:
    for pooling in (PoolingType.NONE, "SUM", None):
        with pytest.raises(ValueError, match=r"'t0'.*SUM and MEAN"):
            bags_collection(device, bag_config(pooling=pooling))
    mixed = [TableConfig("a", 9, 4), TableConfig("b", 9, 4, pooling=Pooling.NONE)]
    with pytest.raises(ValueError, match="cannot share an embedding"):
        TableBatchedEmbedding(mixed, device=device)


def apply_sgd(params: Any, keywords: Any = None) -> None:
    rst.apply_optimizer_in_backward(torch.optim.SGD, params, {"lr": 0.1} if keywords is None else keywords)


def bag_of(fields: dict[str, Any]) -> None:
    bags_collection(CPU, bag_config(**fields))


CPU = torch.device("cpu")
save_to, load_from = partial(rst.Saver().save, bags_collection(CPU)), partial(rst.Saver().load, bags_collection(CPU))
PARAMETER = torch.nn.Parameter(torch.ones(2))
NOT_A_BATCH = "a batch is a {}, expected a KeyedJaggedTensor"
MODES = r"bounds_check_mode is .*'fatal'.*'warning'"
OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"bounds_check_mode": "no_such"}, ValueError, MODES),
    ({"bounds_check_mode": 1}, ValueError, MODES),
    ({"bounds_check_mode": None}, ValueError, MODES),
    ({"batch_size": 0}, ValueError, "batch_size is 0"),
    ({"batch_size": 4, "world_size": 0}, ValueError, "world_size is 0"),
    ({"world_size": -1}, ValueError, "world_size is -1"),
    ({"batch_size": 4, "multi_hot_sizes": [1, 2]}, ValueError, "multi_hot_sizes has 2 entries for 1 tables"),
    ({"batch_size": 4, "multi_hot_sizes": [0]}, ValueError, "multi_hot_sizes"),
    ({"multi_hot_sizes": [1, 2]}, ValueError, "multi_hot_sizes has 2 entries for 1 tables"),
    ({"multi_hot_sizes": 3}, TypeError, "multi_hot_sizes is 3, expected a list"),
    ({"batch_size": True}, TypeError, "is True, expected an int"),
    ({"world_size": True}, TypeError, "is True, expected an int"),
    ({"batch_size": 2, "multi_hot_sizes": [True]}, TypeError, "is True, expected an int"),
    ({"seed": "x"}, TypeError, "seed is 'x', expected an int or None"),
    ({"seed": 1.5}, TypeError, "seed is 1.5"),
    ({"host_store": 3}, TypeError, "host_store is 3, expected the path"),
    ({"host_store": ""}, ValueError, "host_store is '', which is no path"),
    ({"host_store": "a\0b"}, ValueError, "host_store is .*, which is no path"),
    ({"cache_policy": "no_such"}, ValueError, "cache_policy is 'no_such', allowed are"),
    ({"check_finite": "no_such"}, ValueError, r"check_finite is 'no_such', allowed are \['off', 'warn', 'raise'\]"),
]
ARGUMENTS: list[tuple[Callable[[Any], Any], Any, type[Exception], str]] = [
    *((lambda options: bags_collection(CPU, **options), *row) for row in OPTIONS),
    (bags_collection, "x", ValueError, "device is 'x': "),
    (bags_collection, 10**400, ValueError, "device 10+: an int is an index"),
    (bag_of, {"pooling": {}}, ValueError, "pooling {}, allowed are SUM"),
    (bag_of, {"name": ["t"]}, TypeError, r"whose name is \['t'\], expected a string"),
    (bag_of, {"is_incremental": "no"}, TypeError, "is_incremental is 'no', expected a bool"),
    (bags_collection(CPU), None, TypeError, NOT_A_BATCH.format("NoneType")),
    (bags_collection(CPU), "f0", TypeError, NOT_A_BATCH.format("str")),
    (bags_collection(CPU), {"f0": IDS}, TypeError, NOT_A_BATCH.format("dict")),
    (bags_collection(CPU).table_ids, ["t0"], KeyError, "no table is named"),
    (save_to, 3, TypeError, "path is 3, expected the path of a folder"),
    (save_to, b"x", TypeError, "path is b'x', expected the path"),
    (save_to, "a\0b", ValueError, "which has a null character"),
    (load_from, None, TypeError, "path is None, expected the path"),
    (load_from, [3], TypeError, "path is 3, expected the path"),
    (lambda path: TableReader(path, "t0"), 1.5, TypeError, "path is 1.5, expected the path"),
    (lambda number: TableReader(".", "t0", default=number), "x", TypeError, "default is 'x', expected a number"),
    (lambda number: TableReader(".", "t0", default=number), None, TypeError, "default is None, expected a number"),
    (lambda number: TableReader(".", "t0", follow=number), "x", TypeError, "follow is 'x', expected a number"),
    (lambda number: TableReader(".", "t0", follow=number), float("inf"), ValueError, "follow is inf, expected seconds"),
    (lambda number: TableReader(".", "t0", follow=number), 1e11, ValueError, "at most 2.33"),
    (
        lambda depth: rst.prefetch([], bags_collection(CPU), depth=depth),
        "2",
        TypeError,
        "depth is '2', expected an int",
    ),
    (
        lambda f: rst.prefetch([], bags_collection(CPU), features=f),
        "f0",
        TypeError,
        "features is 'f0', expected a funct",
    ),
    (apply_sgd, 3, TypeError, "params is a int, expected several parameters"),
    (apply_sgd, PARAMETER, TypeError, "params is a Parameter, expected several parameters"),
    (apply_sgd, {"w": PARAMETER}, TypeError, "params has a str, expected parameters"),
    (partial(apply_sgd, [PARAMETER]), ["lr"], TypeError, r"optimizer_kwargs is \['lr'\], expected a dict"),
]


@pytest.mark.parametrize(("call", "given", "error", "message"), ARGUMENTS, ids=[each[3][:40] for each in ARGUMENTS])
def test_invalid_arguments_are_refused(
    call: Any, given: Any, error: type[Exception], message: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An invalid argument raises at once, with its name in the message, instead of causing an internal error later."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        call(given)
    assert list(tmp_path.iterdir()) == []


def test_a_device_without_kernels() -> None:
    with pytest.raises(NotImplementedError, match=r"'xla.*cpu"):
        bags_collection(torch.device("xla"))
