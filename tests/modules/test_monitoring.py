"""Monitoring of the cache: counters by table, memory, profiler ranges, warnings, scalars, printing, notebooks."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from batches import jagged
from collection_factory import (
    apply,
    bag_config,
    bags_collection,
    capacity_collection,
    index_bag_config,
    sequence_config,
    sequences_collection,
)
from torchrec import DataType
from training import differing_tensors, train, train_step

import rec_sdk_torch as rst
from rec_sdk_torch.distributed.sharded import ShardedCollection

DIM = 4
RECORD = 4 * DIM


def two_tables(device: torch.device, cache: Any = 4, *, window: int = 1, **fields: Any) -> Any:
    """Builds tables t0 and t1 in one group; `fields` are config fields of t0."""
    configs = [bag_config(**fields), bag_config("t1", ["f1"])]
    return apply(bags_collection(device, *configs, cache=cache), window=window)


def batch(first: list[int], second: list[int]) -> Any:
    return jagged({"f0": [first], "f1": [second]})


def test_counters_are_kept_per_table(device: torch.device) -> None:
    collection = two_tables(device)
    train(collection, [batch([1, 2, 2], [5]), batch([3, 4, 9], [5, 5, 6])])
    first, second, total = collection.cache_stats("t0"), collection.cache_stats("t1"), collection.cache_stats()
    # t0 looks up ids 1 and 2, then 3, 4 and 9: five rows, but the cache has four slots.
    expected = {"batches": 2, "lookups": 6, "unique_rows": 5, "unique_misses": 5, "new_rows": 5, "rows_in": 5}
    expected |= {"rows_out": 1, "bytes_in": 5 * RECORD, "bytes_out": RECORD, "bounds_errors": 0, "largest_batch": 3}
    expected |= {"warmed_rows": 0, "pinned_rows": 0, "admitted": 0, "not_admitted_lookups": 0, "evicted": 0}
    expected |= {"evicted_waiting": 0}
    assert first == expected
    assert (second["lookups"], second["unique_rows"], second["new_rows"], second["rows_out"]) == (4, 3, 2, 0)
    for name in ("lookups", "unique_rows", "unique_misses", "new_rows", "rows_in", "rows_out", "bytes_in"):
        assert total[name] == first[name] + second[name], name
    assert total["batches"] == 2, "one group plans both tables"
    assert total["largest_batch"] == 3
    with pytest.raises(KeyError, match="no table is named 'absent'"):
        collection.cache_stats("absent")


def test_pinned_rows_belong_to_batches_in_flight(device: torch.device) -> None:
    collection = two_tables(device, cache=8)
    one, two = (collection(batch(*ids)).values().sum() for ids in (([1, 2], [5]), ([2, 3], [6])))
    assert collection.cache_stats("t0")["pinned_rows"] == 3
    assert collection.cache_stats()["pinned_rows"] == 5
    one.backward()
    assert collection.cache_stats("t0")["pinned_rows"] == 2
    two.backward()
    assert collection.cache_stats()["pinned_rows"] == 0


def test_times_and_depth_are_counted_until_the_reset(device: torch.device) -> None:
    collection = two_tables(device, cache=20)
    batches = [batch([i, i + 1], [i]) for i in range(4)]
    train_step(collection, batches[0])
    stats = collection.cache_stats()
    assert stats["plan_us"] > 0
    assert stats["wait_us"] > 0
    assert stats["wait_us"] >= stats["plan_us"], "nothing was planned ahead"
    assert stats["depth_reached"] == 0
    for one in batches[1:]:
        collection.prefetch(one)
    collection.wait_for_plans()
    assert collection.cache_stats()["depth_reached"] == 3
    planned = collection.cache_stats()["plan_us"]
    train(collection, batches[1:])
    assert collection.cache_stats()["plan_us"] == planned, "all plans were there"
    collection.reset_cache_stats()
    assert set(collection.cache_stats().values()) == {0}


@pytest.mark.parametrize("window", [1, 2])
def test_memory_is_reported_by_kind(device: torch.device, window: int) -> None:
    collection = two_tables(device, {"t0": 4, "t1": 6}, window=window)
    kinds = ("device", "host", "disk", "index", "columns", "candidates", "evicted", "staging")
    assert collection.memory_report() == dict.fromkeys(kinds, 0), "before the first use"
    train_step(collection, batch([1, 2, 3, 4], [5]))
    slot = RECORD + (8 * DIM if window > 1 else 0)
    report = collection.memory_report()
    assert report["device"] == 10 * slot
    assert collection.memory_report("t0")["device"] == 4 * slot
    assert report["host"] == 0, "nothing has left the cache"
    assert report["index"] == sum(collection.memory_report(table)["index"] for table in ("t0", "t1")) > 0
    train_step(collection, batch([6, 7, 8, 9], [5]))
    collection.state_dict()
    assert collection.memory_report("t0")["host"] > 0 == collection.memory_report("t1")["host"]
    with pytest.raises(KeyError, match="no table is named 'absent'"):
        collection.memory_report("absent")


def test_memory_includes_the_default_row(device: torch.device) -> None:
    collection = two_tables(device, admit_and_evict_config=rst.AdmitAndEvictConfig(admit_threshold=2))
    train_step(collection, batch([1], [5]))
    found = [collection.memory_report(*table)["device"] for table in (("t0",), ("t1",), ())]
    assert found == [(4 + 1) * RECORD, 4 * RECORD, (4 + 1 + 4) * RECORD]


def test_staging_memory_is_held_by_pending_copies(device: torch.device) -> None:
    collection = two_tables(device, cache=8)
    train_step(collection, batch([1, 2], [5]))
    collection.state_dict()  # completes pending write-backs
    before = collection.memory_report()["staging"]
    collection.prefetch(batch([3, 4], [6]))
    collection.wait_for_plans()
    assert collection.memory_report()["staging"] >= before + 3 * RECORD
    collection.forget()
    train_step(collection, batch([1, 2], [5]))
    collection.state_dict()
    assert collection.memory_report()["staging"] == before


def test_the_profiler_sees_the_parts_of_a_step(device: torch.device) -> None:
    collection = two_tables(device)
    train_step(collection, batch([1], [5]))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train_step(collection, batch([1, 2], [5]))
    names = [event.name for event in profile.events() if event.name.startswith("rec_sdk_torch::")]
    assert sorted(names) == [f"rec_sdk_torch::{part}" for part in ("apply", "lookup", "plan", "stage", "update")]


def test_the_profiler_sees_the_thread_that_prefetches(device: torch.device) -> None:
    collection = two_tables(device, cache=8)
    train_step(collection, batch([1], [5]))
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, experimental_config=every_thread) as profile:
        collection.prefetch(batch([2, 3], [6]))
        collection.wait_for_plans()
    names = {event.name for event in profile.events() if event.name.startswith("rec_sdk_torch::")}
    assert names == {"rec_sdk_torch::plan", "rec_sdk_torch::read_ahead"}
    collection.forget()


def test_cache_below_two_batches_warns_once(device: torch.device) -> None:
    small, large = two_tables(device, cache=3), two_tables(device, cache=6)
    batches = [batch([3 * i, 3 * i + 1, 3 * i + 2], [0]) for i in range(70)]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train(large, batches)
    assert not [w for w in seen if "two batches" in str(w.message)]
    with pytest.warns(UserWarning, match=r"does not hold two batches of tables 't0' \(3 rows of 3\)") as found:
        train(small, batches)
    assert len(found) == 1
    assert Path(found[0].filename).name == "training.py", "the line of the lookup"


def test_low_hit_rate_warns_once_and_not_of_new_rows(device: torch.device) -> None:
    def epoch(collection: Any, rows: int, batches: int) -> list[str]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            train(collection, (batch([i % rows], []) for i in range(batches)))
        return [str(w.message) for w in seen if "of the rows" in str(w.message)]

    assert not epoch(two_tables(device, cache=8), rows=1000, batches=100), "all rows are new"
    assert not epoch(two_tables(device, cache=8), rows=8, batches=100), "all rows are resident"
    messages = epoch(two_tables(device, cache=8), rows=24, batches=600)
    assert len(messages) == 1, messages  # the one warning is about a scan over more rows than the cache holds
    assert "were not in the device cache" in messages[0]


class Scalars:
    """A writer that records scalars."""

    def __init__(self) -> None:
        self.written: dict[tuple[str, int], float] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        assert (tag, global_step) not in self.written
        self.written[tag, global_step] = scalar_value


def test_scalars_cover_the_forwards_since_the_last_write(device: torch.device) -> None:
    model = torch.nn.ModuleDict({"sparse": two_tables(device)})
    writer = Scalars()
    log = rst.CacheLog(writer, model, every=2)
    train(model["sparse"], (batch(ids, [5]) for ids in ([1, 2], [1, 3], [1, 2], [1, 4])))
    model.eval()
    model["sparse"](batch([1], [5]))  # evaluation lookups are not counted
    model.train()
    of_t0 = {step: writer.written["sparse/t0/hit_rate", step] for step in (2, 4)}
    assert of_t0 == {2: 0.25, 4: 0.75}
    assert [writer.written["sparse/t0/new_rows", step] for step in (2, 4)] == [1.5, 0.5]
    assert writer.written["sparse/bytes_in", 2] == 2 * RECORD
    assert writer.written["sparse/device_bytes", 4] == 8 * RECORD
    assert {step for _, step in writer.written} == {2, 4}
    model["sparse"].reset_cache_stats()
    train(model["sparse"], [batch([1], [5]), batch([1], [5])])
    assert writer.written["sparse/t0/hit_rate", 6] == 1.0
    log.remove()
    written = len(writer.written)
    train(model["sparse"], [batch([1], [5]), batch([1], [5])])
    assert len(writer.written) == written


def test_norms_of_gradients_are_written_where_they_are_counted(device: torch.device) -> None:
    collection = two_tables(device)
    writer = Scalars()
    rst.CacheLog(writer, collection, every=1)
    train_step(collection, batch([1], [5]))
    assert not [tag for tag, _ in writer.written if "norm" in tag]
    collection.count_grad_norms()
    train(collection, [batch([1, 2], [5]), batch([1], [5])])
    norms, largest = collection.grad_norm(), collection.grad_norm(float("inf"))
    collection(batch([1], [5]))
    assert writer.written["cache/grad_norm", 2] == 0, "no update was counted"
    assert writer.written["cache/grad_norm", 4] == norms.total > 0
    assert writer.written["cache/t0/grad_norm", 4] == norms.tables["t0"]
    assert writer.written["cache/grad_norm_inf", 4] == largest.total
    assert writer.written["cache/t0/grad_norm_inf", 4] == largest.tables["t0"]


class FullDisk(Scalars):
    """A writer that fails while `full` is set."""

    full = True

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        if self.full:
            raise OSError("no space left on device")
        super().add_scalar(tag, scalar_value, global_step)


def test_an_error_of_the_writer_does_not_end_the_training(device: torch.device) -> None:
    """A failing writer warns once. Scalars written later cover only the forwards since the failed write."""
    model = torch.nn.ModuleDict({"sparse": two_tables(device)})
    writer = FullDisk()
    rst.CacheLog(writer, model, every=1)
    with pytest.warns(UserWarning, match="OSError: no space left") as warned:
        train(model["sparse"], [batch([1, 2], [5]), batch([1, 3], [5])])
    assert len([each for each in warned if "CacheLog" in str(each.message)]) == 1
    writer.full = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_step(model["sparse"], batch([1, 4], [5]))
    assert writer.written["sparse/t0/hit_rate", 3] == 0.5
    assert {step for _, step in writer.written} == {3}


def test_invalid_arguments_of_the_log_are_refused(device: torch.device) -> None:
    tables = sequences_collection(device, sequence_config("t0", ["f0"]))
    with pytest.raises(ValueError, match="every is 0"):
        rst.CacheLog(Scalars(), tables, every=0)
    with pytest.raises(TypeError, match="expected one with add_scalar"):
        rst.CacheLog(print, tables)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Linear has no EmbCacheEmbeddingCollection"):
        rst.CacheLog(Scalars(), torch.nn.Linear(1, 1))


INDEX = index_bag_config("t1", ["f1"], num_embeddings=9, embedding_dim=3)
SHOWN: dict[str, tuple[Any, list[str]]] = {
    "pooled": (lambda device: bags_collection(device, cache={"t0": 7}), ["float32, ids of any value, cache=7"]),
    "sequences": (
        lambda device: sequences_collection(
            device, sequence_config(data_type=DataType.FP16), cache_dtype=torch.float32
        ),
        ["float16 (float32 in the cache), ids of any value, cache=None"],
    ),
    "index": (
        lambda device: bags_collection(device, bag_config(), INDEX, cache=0.5),
        ["float32, ids of any value, cache=0.5", "float32, ids are rows, cache=0.5"],
    ),
    "hash": (capacity_collection, ["float32, ids of any value, cache=40"]),
    "meta": (
        lambda device: bags_collection(torch.device("meta"), cache={"t0": 7}),
        ["float32, ids of any value, cache=7"],
    ),
}


@pytest.mark.parametrize("kind", list(SHOWN))
def test_printing_a_model_shows_its_tables(device: torch.device, kind: str) -> None:
    """Printing allocates no table, so an optimizer may still be applied afterwards."""
    make, lines = SHOWN[kind]
    collection = make(device)
    model = torch.nn.Sequential(collection)
    shown = [line.strip() for line in repr(model).splitlines() if "TableHandle" in line]
    sizes = ("40 x 4", "9 x 3")
    expected = [f"(t{n}): TableHandle({sizes[n]}, {line}, no optimizer)" for n, line in enumerate(lines)]
    assert shown == expected
    apply(collection, torch.optim.Adam, lr=0.25)
    assert repr(model).count("Adam(lr=0.25)") == len(lines)
    assert not collection.embedding.layout.built
    assert repr(collection.embedding).count("no optimizer") == len(lines), "it has not been told yet"


def test_printing_shows_the_current_cache_size_and_rate(device: torch.device) -> None:
    collection = two_tables(device)
    train_step(collection, batch([1], [2]))
    collection.fused_optimizer.param_groups[0]["lr"] = 0.125
    line = "40 x 4, float32, ids of any value, cache of 4 rows, SGD(lr=0.125)"
    assert repr(collection).count(f"TableHandle({line})") == 2
    assert repr(collection.embedding) == f"TableBatchedEmbedding(\n  t0: {line}\n  t1: {line}\n)"


def test_cache_sizes_is_a_property_everywhere() -> None:
    classes = [value for value in map(rst.__getattr__, rst.__all__) if isinstance(value, type)] + [ShardedCollection]
    found = {each.__name__: inspect.getattr_static(each, "cache_sizes", None) for each in classes}
    kinds = {name: type(value) for name, value in found.items() if value is not None}
    assert set(kinds.values()) == {property}
    assert {"TableBatchedEmbedding", "HashEmbeddingBagCollection", "ShardedCollection"} < kinds.keys()


def cells(collection: Any) -> dict[str, list[str]]:
    """Returns the cells of each table in the notebook view; fails if its HTML is not well-formed."""
    root = ElementTree.fromstring(collection._repr_html_())
    head = [cell.text for cell in root.findall("./thead/tr/th")]
    assert head == ["table", "rows", "of", "columns", "in the cache", "hit rate", "device MiB", "host MiB"]
    rows = [["".join(cell.itertext()) for cell in row] for row in root.findall("./tbody/tr")]
    assert all(len(row) == len(head) for row in rows)
    return {name: found for name, *found in rows}


def test_notebooks_show_rows_cache_and_rate(device: torch.device) -> None:
    collection = two_tables(device, num_embeddings=4000)
    train(collection, [batch(ids, [5]) for ids in ([1, 2], [2, 3], [7, 8])])
    stats = collection.cache_stats("t0")
    # The table has ids 1, 2, 3, 7 and 8; of the 6 rows that batches looked up, one was already cached.
    assert (stats["unique_rows"], stats["unique_misses"]) == (6, 5)
    shown = cells(collection)
    assert shown["t0"][:5] == ["5", "4,000", "4", "4", "16.7%"]
    assert list(shown) == ["t0", "t1"]
    for name, found in shown.items():
        memory = collection.memory_report(name)
        assert found[5:] == [f"{memory[kind] / 2**20:.2f}" for kind in ("device", "host")]
    assert f"EmbCacheEmbeddingBagCollection on {collection.device}" in collection._repr_html_()
    collection.reset_cache_stats()
    assert cells(collection)["t0"][4] == "-", "no rate without lookups"


@pytest.mark.parametrize("meta", [False, True])
def test_displaying_in_a_notebook_allocates_nothing(device: torch.device, meta: bool) -> None:
    """After displaying, options may still change.

    A collection on the meta device, without rows, can be displayed too.
    """
    collection = bags_collection(torch.device("meta") if meta else device, cache=4)
    assert cells(collection)["t0"][:5] == ["-", "40", "4", "-", "-"]
    assert not collection.embedding.layout.built


def test_prefetched_batches_are_trained_as_before(device: torch.device) -> None:
    """Tables may be displayed between any two steps."""
    batches = [batch([n, n + 1], [n % 9]) for n in range(6)]
    plain, shown = two_tables(device, 40), two_tables(device, 40)
    train(plain, batches)
    for one in rst.prefetch(batches, shown, depth=2):
        cells(shown)
        train_step(shown, one)
        cells(shown)
    assert not list(differing_tensors(plain.state_dict(), shown.state_dict()))
    assert cells(shown)["t0"][0] == "7"
