"""The size of the device cache, which limits only the number of distinct rows of a batch."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from batches import jagged, numbered, single_ids
from collection_factory import EACH_KIND, Kind, apply, bag_config, bags_collection, index_bag_config, sequence_config
from training import assert_trains, differing_tensors, read, rows_of, state_of, train, train_step

import rec_sdk_torch as rst
from rec_sdk_torch._engine import cache_policies
from rec_sdk_torch.operators.devices.backends import backend_for
from rec_sdk_torch.runtime.settings import parse_bytes
from rec_sdk_torch.tbe.config.cache_size import BatchHint, cache_slots
from rec_sdk_torch.tbe.config.table import TableConfig
from rec_sdk_torch.tbe.rows import layout

HASHED = {"num_embeddings": 1000, "embedding_dim": 4}  # 16 bytes per row without optimizer states
WIDE = index_bag_config("t1", ["f1"], num_embeddings=500, embedding_dim=8)  # 32 bytes per row


def sizes(device: torch.device, **options: Any) -> tuple[int, ...]:
    collection = apply(bags_collection(device, bag_config(**HASHED), WIDE, **options))
    given = collection.cache_sizes
    train_step(collection, jagged({"f0": [[1]], "f1": [[1]]}))
    assert collection.cache_sizes == given
    slots = [member.slots for group in collection.embedding.groups for member in group.members]
    assert list(given.values()) == slots, "what is read back is what was allocated"
    assert sum(group.swap.cache.shape[0] for group in collection.embedding.groups) == sum(slots)
    return tuple(slots)


SMALL_HINT = {"batch_size": 20, "multi_hot_sizes": [6, 3]}  # a batch of 20 samples with 6 ids of t0 and 3 of t1


@pytest.mark.parametrize(
    ("cache", "expected", "hint"),
    [
        (7, (7, 7), {}),
        (600, (600, 500), {}),  # capped at the index table's 500 rows
        (3000, (3000, 500), {}),  # not capped: num_embeddings does not limit a hash table
        (1.0, (1000, 500), {}),
        (0.25, (250, 125), {}),
        (0.001, (1, 1), {}),  # numbers of rows are rounded up
        (0.0101, (11, 6), {}),
        ("1GiB", (1000, 500), {}),  # at most the whole tables
        ("16000B", (499, 250), {}),  # half of both tables' total of 32000 bytes: split in proportion, rounded down
        ("16 kb", (499, 250), {}),
        ("0.016MB", (499, 250), {}),
        ("16000", (499, 250), {}),
        ({"t0": 7, "t1": 0.5}, (7, 250), {}),
        ({"t0": "160B", "t1": "1KiB"}, (10, 32), {}),
        ({"t0": "1MiB", "t1": "1MiB"}, (1000, 500), {}),
        ({"t1": 3}, (1000, 3), {}),
        ({}, (1000, 500), {}),
        (None, (1000, 500), {}),
        (0.5, (500, 250), SMALL_HINT),  # a fraction is raised to hold at least one batch
        (0.1, (120, 60), SMALL_HINT),
        (0.1, (120, 60), {"batch_size": 10, "world_size": 2, "multi_hot_sizes": [6, 3]}),
        (1.0, (1000, 500), SMALL_HINT),
        ({"t0": 0.1}, (120, 500), SMALL_HINT),
        ({"t1": 0.001, "t0": 7}, (7, 60), SMALL_HINT),  # an explicit number of rows is never raised
        (0.05, (120, 60), SMALL_HINT),
    ],
    ids=str,
)
def test_cache_options_give_these_sizes(
    device: torch.device, cache: Any, expected: tuple[int, int], hint: dict[str, Any]
) -> None:
    assert sizes(device, cache=cache, **hint) == expected


def test_a_share_of_a_small_table_is_all_of_it(device: torch.device) -> None:
    collection = apply(bags_collection(device, index_bag_config(num_embeddings=3), cache=0.1, batch_size=32))
    assert collection.cache_sizes == {"t0": 3}
    train_step(collection, single_ids([0, 1, 2]))


SMALL = bag_config("t0", ["f0"], num_embeddings=146, embedding_dim=4)
LARGE = index_bag_config("t1", ["f1"], num_embeddings=9000)
INDEX = index_bag_config(num_embeddings=146)


def numbers(step: int, batch_size: int = 60) -> Any:
    """Builds a batch with distinct ids of both tables."""
    ids = np.arange(batch_size) + batch_size * step
    return jagged({"f0": (ids % 146)[:, None].tolist(), "f1": ids[:, None].tolist()})


@pytest.mark.parametrize("small", [SMALL, INDEX])
@pytest.mark.parametrize(
    ("cache", "before", "depth", "expected"),
    [
        (0.1, (15, 900), 0, (60, 900)),
        (0.01, (2, 90), 0, (60, 90)),
        (0.1, (15, 900), 1, (120, 900)),
        (0.01, (2, 90), 2, (146, 180)),  # three batches, but at most the table's rows
        ({"t0": 0.1, "t1": 70}, (15, 70), 0, (60, 70)),  # an explicit number of rows is never raised
        ("14632B", (15, 899), 0, (67, 846)),  # a tenth of both tables' bytes
        ("14632B", (15, 899), 2, (146, 768)),
    ],
    ids=str,
)
def test_a_share_holds_the_first_batch_and_prefetched_ones(
    device: torch.device, small: Any, cache: Any, before: tuple[int, int], depth: int, expected: tuple[int, int]
) -> None:
    collection, large = (apply(bags_collection(device, small, LARGE, cache=size)) for size in (cache, 1000))
    assert tuple(collection.cache_sizes.values()) == before
    for batch in rst.prefetch(map(numbers, range(9)), collection, depth=depth):
        train_step(collection, batch)
        assert tuple(collection.cache_sizes.values()) == expected
    train(large, map(numbers, range(9)))
    assert not list(differing_tensors(collection.state_dict(), large.state_dict()))
    if device.type == "cpu":
        assert tuple(copy.deepcopy(collection).cache_sizes.values()) == expected


@pytest.mark.parametrize("cache", [15, {"t0": 15}, {"t0": "240B"}])
def test_numbers_of_rows_are_used_exactly(device: torch.device, cache: Any) -> None:
    collection = apply(bags_collection(device, SMALL, LARGE, cache=cache))
    with pytest.raises(rst.CacheTooSmallError, match="'t0'"):
        collection(numbers(0))
    assert collection.cache_sizes["t0"] == 15


def test_memory_that_is_too_small_for_the_first_batch(device: torch.device) -> None:
    """A batch with more ids than the cache has rows can still be trained, because its ids repeat."""
    collection = apply(bags_collection(device, SMALL, LARGE, cache="160B"))
    train_step(collection, jagged({"f0": [[1]] * 60, "f1": [[2]] * 60}))
    assert sum(collection.cache_sizes.values()) <= 10


@pytest.mark.parametrize("first", ["load", "read", "empty"])
def test_tables_that_were_in_use_before_the_first_batch(device: torch.device, first: str) -> None:
    source, collection = (
        apply(bags_collection(device, SMALL, LARGE, cache=cache), torch.optim.Adagrad) for cache in (1000, 0.01)
    )
    train_step(source, numbers(0))
    if first == "empty":
        train_step(collection, jagged({"f0": [[]], "f1": [[]]}))
    if first == "read":
        read(collection, numbers(0))
    collection.load_state_dict(source.state_dict())
    collection.fused_optimizer.load_state_dict(source.fused_optimizer.state_dict())
    assert tuple(collection.cache_sizes.values()) == (2, 90)
    for each in (source, collection):
        train(each, map(numbers, range(1, 4)))
    assert tuple(collection.cache_sizes.values()) == (60, 90)
    assert not list(differing_tensors(state_of(source), state_of(collection)))


@pytest.mark.parametrize("cache", [146, 0.1, "18000B"], ids=str)
def test_a_device_without_memory_for_a_second_cache(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, cache: Any
) -> None:
    """If reading a table has already allocated its cache, training reuses that cache."""
    collection = apply(bags_collection(device, SMALL, LARGE, cache=cache))
    read(collection, numbers(0))
    before = collection.cache_sizes
    backend = dataclasses.replace(backend_for(device), free_memory=lambda device: 0)
    monkeypatch.setattr(layout, "backend_for", lambda device: backend)
    if before["t0"] < 60:
        with pytest.raises(rst.CacheTooSmallError, match="'t0'"):
            collection(numbers(0))
    train_step(collection, numbers(0, batch_size=15))
    assert collection.cache_sizes == before


@pytest.mark.parametrize(("cls", "rows"), [(torch.optim.SGD, 500), (torch.optim.Adagrad, 250), (torch.optim.Adam, 166)])
def test_optimizer_states_reduce_the_number_of_rows(device: torch.device, cls: type, rows: int) -> None:
    """With Adam, a row record is three times as large as the weight, so a cache of the same bytes holds a third
    of the rows.
    """
    collection = apply(bags_collection(device, bag_config(**HASHED), cache="8000B"), cls)
    assert collection.cache_sizes == {"t0": rows}


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("16000", (499, 250)), ("32000B", (1000, 500)), ("8 kB", (249, 125)), ("1GiB", (1000, 500)), (None, (1000, 500))],
)
def test_environment_variable_sets_the_size(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, setting: str | None, expected: tuple[int, int]
) -> None:
    monkeypatch.delenv("EMBCACHE_SIZE_ON_DEVICE_MEM", raising=False)
    if setting is not None:
        monkeypatch.setenv("EMBCACHE_SIZE_ON_DEVICE_MEM", setting)
    assert sizes(device) == expected
    assert sizes(device, cache=9) == (9, 9), "an explicit cache= wins"
    assert sizes(device, cache="1GiB") == (1000, 500)


def test_an_invalid_environment_variable_is_refused(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    collection = bags_collection(device)
    for text in ("lots", "-1", "0", "", f"{2**63}"):
        monkeypatch.setenv("EMBCACHE_SIZE_ON_DEVICE_MEM", text)
        with pytest.raises(ValueError, match=f"EMBCACHE_SIZE_ON_DEVICE_MEM.*'{text}'"):
            read(collection, numbered(1))
    monkeypatch.delenv("EMBCACHE_SIZE_ON_DEVICE_MEM")
    apply(collection)
    assert_trains(collection)


@pytest.mark.parametrize("prefix", ["k", "M", "G", "T"])
def test_units_of_bytes(prefix: str) -> None:
    power = " kMGT".index(prefix)
    for text in (f"3{prefix}B", f"3.0 {prefix.lower()}b", f" 3{prefix.upper()}B "):
        assert parse_bytes(text, "cache") == 3 * 1000**power
    assert parse_bytes(f"3{prefix}iB", "cache") == 3 * 1024**power
    with pytest.raises(ValueError, match=rf"cache: expected a size in bytes.*got '3{prefix}'"):
        parse_bytes(f"3{prefix}", "cache")


def hinted(cache: Any = None, free: int = 2**40, hashed: bool = True, **hint: Any) -> list[int]:
    tables = [TableConfig("a", 10**6, 4, num_features=2, hashed=hashed), TableConfig("b", 300, 4)]
    return cache_slots(tables, [16, 16], cache, BatchHint(**hint), free)


def test_a_cache_holds_two_batches_of_the_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every table gets at least `2 * batch_size * multi_hot_size * world_size` rows, or all of its rows.

    The remaining memory is divided in proportion to the rows that tables still lack.

    """
    monkeypatch.setenv("EMBCACHE_SIZE_ON_DEVICE_MEM", str(16 * 1000))
    wanted = 10**6 + 300
    for hint, least in (
        ({"batch_size": 10}, (2 * 10 * 2, 2 * 10)),  # without multi_hot_sizes, one id per feature is assumed
        ({"batch_size": 10, "multi_hot_sizes": [5, 1]}, (100, 20)),
        ({"batch_size": 10, "multi_hot_sizes": [5, 1], "world_size": 4}, (400, 80)),
        ({"batch_size": 10, "multi_hot_sizes": [5, 20]}, (100, 300)),
        ({"world_size": 4}, (1, 1)),
    ):
        slots = hinted(**hint)
        rest = 1000 - sum(least)
        for given, need, rows in zip(slots, least, (10**6, 300), strict=True):
            assert need <= given <= need + rest * (rows - need) / (wanted - sum(least)) < given + 1
    with pytest.raises(ValueError, match=r"EMBCACHE_SIZE_ON_DEVICE_MEM.*16000 bytes, two batches of"):
        hinted(batch_size=500)
    with pytest.raises(ValueError, match="cache='1KiB' allows 1024 bytes, two batches"):
        hinted(cache="1KiB", batch_size=500)
    assert hinted(cache=3, batch_size=500) == [3, 3], "an explicit number of rows is not second-guessed"


def test_a_cache_never_exceeds_free_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EMBCACHE_SIZE_ON_DEVICE_MEM", raising=False)
    assert sum(hinted(free=32_000)) <= 1000, "derived: half of what is free"
    assert sum(hinted(free=32_000)) >= 998
    assert sum(hinted(cache="32000B", free=32_000)) <= 2000
    for cache in (1001, 1.0, "32016B", {"a": 1500, "b": 300}):
        with pytest.raises(MemoryError, match=r"cache: \d+ bytes for tables \['a', 'b'\].*give a smaller cache="):
            hinted(cache=cache, free=28_000)


def test_larger_batches_than_batch_size_are_legal(device: torch.device) -> None:
    hint = {"batch_size": 2, "multi_hot_sizes": [1]}
    collection = apply(bags_collection(device, bag_config(**HASHED), **hint, cache={"t0": 40}))
    before = read(collection, numbered(40))
    train_step(collection, single_ids([*range(40)] * 3))
    torch.testing.assert_close(before - read(collection, numbered(40)), torch.full((1, 4), 40 * 1.5), rtol=1e-4, atol=0)
    derived = apply(bags_collection(device, bag_config(**HASHED), **hint))
    train_step(derived, numbered(100))
    assert len(rows_of(derived)) == 100


def test_positional_arguments_are_rec_sdks(device: torch.device) -> None:
    """Positional arguments are tables, world_size, batch_size, multi_hot_sizes, need_indices or is_weighted, offsets,
    device, optimizer.

    """
    sgd = torch.optim.SGD
    bags = rst.EmbCacheEmbeddingBagCollection([bag_config()], 2, 3, [4], True, True, device, sgd, cache=5)
    assert bags.is_weighted()
    assert bags.cache_sizes == {"t0": 5}
    assert bags.device.type == device.type
    sequence = sequence_config()
    sequences = rst.EmbCacheEmbeddingCollection([sequence], 2, 3, [4], True, True, device, sgd, seed=3)
    assert sequences.need_indices()
    for collection in (bags, sequences):
        assert collection.embedding.options.batch_hint == BatchHint(3, [4], 2)
        with pytest.raises(TypeError, match="embedding_optimizer_cls"):
            apply(collection, torch.optim.Adagrad)


@EACH_KIND
@pytest.mark.parametrize("policy", cache_policies())
def test_the_cache_policy_of_a_collection(device: torch.device, policy: str, kind: Kind) -> None:
    collection = kind.collection(device, cache=2, cache_policy=policy)
    assert collection.embedding.options.cache_policy == policy
    assert copy.deepcopy(collection).embedding.options.cache_policy == policy
