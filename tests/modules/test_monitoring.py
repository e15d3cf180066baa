"""The view of the cache that users have: counts by table, memory, the profiler's ranges, warnings, scalars."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
from jagged import apply, bag_config, bags_collection, jagged, sequence_config, sequences_collection
from torchrec import DataType, EmbeddingBagConfig

import rec_sdk_torch as rst
from rec_sdk_torch.distributed.sharded import ShardedCollection

DIM = 4
RECORD = 4 * DIM


def two_tables(device: torch.device, cache: int = 4, **options: Any) -> Any:
    configs = [bag_config("t0", ["f0"]), bag_config("t1", ["f1"])]
    collection = bags_collection(device, *configs, cache=cache, **options)
    apply(collection, torch.optim.SGD)
    return collection


def batch(first: list[int], second: list[int]) -> Any:
    return jagged({"f0": [first], "f1": [second]})


def train(collection: Any, *batches: Any) -> None:
    for one in batches:
        collection(one).values().sum().backward()


def test_counts_are_of_each_table(device: torch.device) -> None:
    collection = two_tables(device)
    train(collection, batch([1, 2, 2], [5]), batch([3, 4, 9], [5, 5, 6]))
    first, second, total = collection.cache_stats("t0"), collection.cache_stats("t1"), collection.cache_stats()
    # Ids of t0: 1 and 2, then 3, 4 and 9, for which one of four slots is missing.
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


def test_pins_are_of_batches_in_flight(device: torch.device) -> None:
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
    train(collection, batches[0])
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
    train(collection, *batches[1:])
    assert collection.cache_stats()["plan_us"] == planned, "all plans were there"
    collection.reset_cache_stats()
    assert set(collection.cache_stats().values()) == {0}


@pytest.mark.parametrize("window", [1, 2])
def test_memory_is_reported_by_what_holds_it(device: torch.device, window: int) -> None:
    collection = bags_collection(device, bag_config("t0", ["f0"]), bag_config("t1", ["f1"]), cache={"t0": 4, "t1": 6})
    assert collection.memory_report() == {
        "device": 0,
        "host": 0,
        "disk": 0,
        "index": 0,
        "columns": 0,
        "candidates": 0,
        "evicted": 0,
        "staging": 0,
    }, "before the first use"
    if window > 1:
        options = {"lr": 0.1, "use_accumulate": True, "accumulate_step": window}
        rst.apply_optimizer_in_backward(rst.AccumulateSGD, collection.parameters(), options)
    else:
        apply(collection, torch.optim.SGD)
    train(collection, batch([1, 2, 3, 4], [5]))
    slot = RECORD + (8 * DIM if window > 1 else 0)
    report = collection.memory_report()
    assert report["device"] == 10 * slot
    assert collection.memory_report("t0")["device"] == 4 * slot
    assert report["host"] == 0, "nothing has left the cache"
    assert report["index"] == sum(collection.memory_report(table)["index"] for table in ("t0", "t1")) > 0
    train(collection, batch([6, 7, 8, 9], [5]))
    collection.state_dict()
    assert collection.memory_report("t0")["host"] > 0 == collection.memory_report("t1")["host"]
    with pytest.raises(KeyError, match="no table is named 'absent'"):
        collection.memory_report("absent")


def test_memory_of_the_row_of_ids_that_are_not_admitted(device: torch.device) -> None:
    rules = rst.AdmitAndEvictConfig(admit_threshold=2)
    collection = bags_collection(
        device, bag_config("t0", admit_and_evict_config=rules), bag_config("t1", ["f1"]), cache=4
    )
    apply(collection, torch.optim.SGD)
    train(collection, batch([1], [5]))
    assert collection.memory_report("t0")["device"] == (4 + 1) * RECORD
    assert collection.memory_report("t1")["device"] == 4 * RECORD
    assert collection.memory_report()["device"] == (4 + 1 + 4) * RECORD


def test_staging_is_what_is_on_its_way(device: torch.device) -> None:
    collection = two_tables(device, cache=8)
    train(collection, batch([1, 2], [5]))
    collection.state_dict()  # lands what is on its way
    before = collection.memory_report()["staging"]
    collection.prefetch(batch([3, 4], [6]))
    collection.wait_for_plans()
    assert collection.memory_report()["staging"] >= before + 3 * RECORD
    collection.forget()
    train(collection, batch([1, 2], [5]))
    collection.state_dict()
    assert collection.memory_report()["staging"] == before


def test_the_profiler_sees_the_parts_of_a_step(device: torch.device) -> None:
    collection = two_tables(device)
    train(collection, batch([1], [5]))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(collection, batch([1, 2], [5]))
    names = [event.name for event in profile.events() if event.name.startswith("rec_sdk_torch::")]
    assert sorted(names) == [f"rec_sdk_torch::{part}" for part in ("apply", "lookup", "plan", "stage", "update")]


def test_the_profiler_sees_the_thread_that_prefetches(device: torch.device) -> None:
    collection = two_tables(device, cache=8)
    train(collection, batch([1], [5]))
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
        train(large, *batches)
    assert not [w for w in seen if "two batches" in str(w.message)]
    with pytest.warns(UserWarning, match=r"does not hold two batches of tables 't0' \(3 rows of 3\)") as found:
        train(small, *batches)
    assert len(found) == 1
    assert found[0].filename == __file__


def test_low_hit_rate_warns_once_and_not_of_new_rows(device: torch.device) -> None:
    def epoch(collection: Any, rows: int, batches: int) -> list[str]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            train(collection, *(batch([i % rows], []) for i in range(batches)))
        return [str(w.message) for w in seen if "of the rows" in str(w.message)]

    assert not epoch(two_tables(device, cache=8), rows=1000, batches=100), "all rows are new"
    assert not epoch(two_tables(device, cache=8), rows=8, batches=100), "all rows are resident"
    messages = epoch(two_tables(device, cache=8), rows=24, batches=600)
    assert len(messages) == 1, messages  # of a scan that does not fit
    assert "were not in the device cache" in messages[0]


class Scalars:
    """A writer that remembers."""

    def __init__(self) -> None:
        self.written: dict[tuple[str, int], float] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        assert (tag, global_step) not in self.written
        self.written[tag, global_step] = scalar_value


def test_scalars_are_of_the_forwards_since_the_last(device: torch.device) -> None:
    model = torch.nn.ModuleDict({"sparse": two_tables(device)})
    writer = Scalars()
    log = rst.CacheLog(writer, model, every=2)
    train(model["sparse"], *(batch(ids, [5]) for ids in ([1, 2], [1, 3], [1, 2], [1, 4])))
    model.eval()
    model["sparse"](batch([1], [5]))  # counts nothing
    model.train()
    of_t0 = {step: writer.written["sparse/t0/hit_rate", step] for step in (2, 4)}
    assert of_t0 == {2: 0.25, 4: 0.75}
    assert [writer.written["sparse/t0/new_rows", step] for step in (2, 4)] == [1.5, 0.5]
    assert writer.written["sparse/bytes_in", 2] == 2 * RECORD
    assert writer.written["sparse/device_bytes", 4] == 8 * RECORD
    assert {step for _, step in writer.written} == {2, 4}
    model["sparse"].reset_cache_stats()
    train(model["sparse"], batch([1], [5]), batch([1], [5]))
    assert writer.written["sparse/t0/hit_rate", 6] == 1.0
    log.remove()
    written = len(writer.written)
    train(model["sparse"], batch([1], [5]), batch([1], [5]))
    assert len(writer.written) == written


def test_norms_of_gradients_are_written_where_they_are_counted(device: torch.device) -> None:
    collection = two_tables(device)
    writer = Scalars()
    rst.CacheLog(writer, collection, every=1)
    train(collection, batch([1], [5]))
    assert not [tag for tag, _ in writer.written if "norm" in tag]
    collection.count_grad_norms()
    train(collection, batch([1, 2], [5]), batch([1], [5]))
    norms, largest = collection.grad_norm(), collection.grad_norm(float("inf"))
    collection(batch([1], [5]))
    assert writer.written["cache/grad_norm", 2] == 0, "no update was counted"
    assert writer.written["cache/grad_norm", 4] == norms.total > 0
    assert writer.written["cache/t0/grad_norm", 4] == norms.tables["t0"]
    assert writer.written["cache/grad_norm_inf", 4] == largest.total
    assert writer.written["cache/t0/grad_norm_inf", 4] == largest.tables["t0"]


class FullDisk(Scalars):
    """A writer that cannot write for a while."""

    full = True

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        if self.full:
            raise OSError("no space left on device")
        super().add_scalar(tag, scalar_value, global_step)


def test_an_error_of_the_writer_does_not_end_the_training(device: torch.device) -> None:
    """It warns once; scalars that can be written later are those of their own forwards."""
    model = torch.nn.ModuleDict({"sparse": two_tables(device)})
    writer = FullDisk()
    rst.CacheLog(writer, model, every=1)
    with pytest.warns(UserWarning, match="OSError: no space left") as warned:
        train(model["sparse"], batch([1, 2], [5]), batch([1, 3], [5]))
    assert len([each for each in warned if "CacheLog" in str(each.message)]) == 1
    writer.full = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model["sparse"], batch([1, 4], [5]))
    assert writer.written["sparse/t0/hit_rate", 3] == 0.5
    assert {step for _, step in writer.written} == {3}


def test_what_cannot_be_logged_is_refused(device: torch.device) -> None:
    tables = sequences_collection(device, sequence_config("t0", ["f0"]))
    with pytest.raises(ValueError, match="every is 0"):
        rst.CacheLog(Scalars(), tables, every=0)
    with pytest.raises(TypeError, match="expected one with add_scalar"):
        rst.CacheLog(print, tables)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Linear has no EmbCacheEmbeddingCollection"):
        rst.CacheLog(Scalars(), torch.nn.Linear(1, 1))


# ---- print


WIDE = torch.float32
ANY = "ids of any value"
KINDS: dict[str, tuple[Any, list[str]]] = {
    "pooled": (
        lambda device: bags_collection(device, bag_config(), cache={"t0": 7}),
        ["(t0): TableHandle(40 x 4, float32, ids of any value, cache=7, no optimizer)"],
    ),
    "sequences": (
        lambda device: sequences_collection(
            device, sequence_config(data_type=DataType.FP16), cache_dtype=torch.float32
        ),
        [f"(t0): TableHandle(40 x 4, float16 (float32 in the cache), {ANY}, cache=None, no optimizer)"],
    ),
    "index": (
        lambda device: bags_collection(
            device, bag_config(), EmbeddingBagConfig(9, 3, name="t1", feature_names=["f1"]), cache=0.5
        ),
        [
            "(t0): TableHandle(40 x 4, float32, ids of any value, cache=0.5, no optimizer)",
            "(t1): TableHandle(9 x 3, float32, ids are rows, cache=0.5, no optimizer)",
        ],
    ),
    "hash": (
        lambda device: rst.HashEmbeddingBagCollection(
            [rst.HashEmbeddingBagConfig(num_embeddings=40, embedding_dim=4, name="t0", feature_names=["f0"])],
            device=device,
        ),
        ["(t0): TableHandle(40 x 4, float32, ids of any value, cache=40, no optimizer)"],
    ),
    "meta": (
        lambda device: bags_collection(torch.device("meta"), bag_config(), cache={"t0": 7}),
        ["(t0): TableHandle(40 x 4, float32, ids of any value, cache=7, no optimizer)"],
    ),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_printing_a_model_shows_its_tables(device: torch.device, kind: str) -> None:
    """And lays nothing out: an optimizer may be applied still."""
    make, lines = KINDS[kind]
    collection = make(device)
    model = torch.nn.Sequential(collection)
    shown = [line.strip() for line in repr(model).splitlines()]
    assert [line for line in shown if "TableHandle" in line] == lines
    apply(collection, torch.optim.Adam, lr=0.25)
    assert repr(model).count("Adam(lr=0.25)") == len(lines)
    assert not collection.embedding.layout.built
    assert repr(collection.embedding).count("no optimizer") == len(lines), "it has not been told yet"


def test_printing_shows_the_cache_and_rate_of_now(device: torch.device) -> None:
    collection = two_tables(device)
    train(collection, batch([1], [2]))
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
