"""Admission and eviction of ids through collections, pipelines and batches with timestamps or click labels.

That every rule is right at every cache size and depth is the oracle's (tests/tbe/test_oracle.py).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from jagged import apply, bag_config, bags_collection, jagged, sequence_config, sequences_collection
from torch.utils._pytree import tree_map
from torchrec import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

import rec_sdk_torch as rst
from rec_sdk_torch.sparse.jagged_tensor_with_timestamp import clicks_of

SHOWCLICK = rst.AdmitAndEvictPolicyType.POLICY_SHOWCLICK
DEFAULT = 0.5


def rules(**fields: Any) -> rst.AdmitAndEvictConfig:
    return rst.AdmitAndEvictConfig(**{"not_admitted_default_value": DEFAULT, **fields})


def sequence(device: torch.device, **fields: Any) -> rst.EmbCacheEmbeddingCollection:
    collection = sequences_collection(device, sequence_config(admit_and_evict_config=rules(**fields)), cache=8)
    apply(collection, torch.optim.Adagrad)
    return collection


def stamped(ids: list[int], seconds: list[int]) -> rst.KeyedJaggedTensorWithTimestamp:
    """One sample per id."""
    values, stamps = torch.tensor(ids, dtype=torch.int64), torch.tensor(seconds, dtype=torch.int64)
    lengths = torch.ones(len(ids), dtype=torch.int32)
    return rst.KeyedJaggedTensorWithTimestamp.from_jt_dict(
        {"f0": rst.JaggedTensorWithTimestamp(values, lengths=lengths, timestamps=stamps)}
    )


def plain(ids: list[int]) -> KeyedJaggedTensor:
    return jagged({"f0": [[i] for i in ids]})


def train(collection: Any, features: KeyedJaggedTensor) -> torch.Tensor:
    rows: torch.Tensor = collection(features)["f0"].values()
    rows.sum().backward()
    return rows.detach().cpu()


def ids(collection: Any) -> list[int]:
    return sorted(collection.table_ids("t0").tolist())


def defaults(rows: torch.Tensor) -> list[bool]:
    return [bool((row == DEFAULT).all()) for row in rows]


# ---- admission


def test_a_batch_that_reaches_the_threshold_reads_the_row(device: torch.device) -> None:
    collection = sequence(device, admit_threshold=3)
    assert defaults(train(collection, plain([1, 1, 2]))) == [True, True, True]
    assert defaults(train(collection, plain([2, 1, 2]))) == [False, False, False]
    assert ids(collection) == [1, 2]
    assert collection.cache_stats("t0")["not_admitted_lookups"] == 3
    assert collection.cache_stats("t0")["admitted"] == 2


def test_the_gradient_of_the_default_value_is_dropped(device: torch.device) -> None:
    collection = sequence(device, admit_threshold=2)
    first = train(collection, plain([1, 2, 2]))
    assert defaults(first) == [True, False, False]
    assert torch.equal(train(collection, plain([7]))[0], torch.full((4,), DEFAULT)), "the constant is trained by nobody"
    initial = collection.embedding.view("t0").read(torch.tensor([1]))  # it was looked up once
    assert torch.equal(initial.parts["sum"], torch.zeros(1, 4)), "no state of an id without a row"


def test_evaluation_counts_nothing(device: torch.device) -> None:
    collection = sequence(device, admit_threshold=2)
    train(collection, plain([1]))
    collection.eval()
    assert defaults(collection(plain([1, 5]))["f0"].values().cpu()) == [True, True]
    with torch.no_grad():
        collection.train()(plain([1, 1, 1]))
    assert defaults(train(collection, plain([9]))) == [True]
    assert ids(collection) == []
    assert defaults(train(collection, plain([1]))) == [False]


def test_bags_pool_the_default_value(device: torch.device) -> None:
    config = bag_config(admit_and_evict_config=rules(admit_threshold=2))
    collection = bags_collection(device, config, cache=8)
    apply(collection, torch.optim.SGD)
    pooled = collection(jagged({"f0": [[1, 2], [1], []]})).values()
    pooled.sum().backward()
    row = collection.embedding.view("t0")
    initial = bags_collection(device, bag_config(), cache=8).embedding.view("t0").read(torch.tensor([1]))
    expected = initial.parts["weight"][0]
    assert torch.allclose(pooled[1].detach().cpu(), expected)
    assert torch.allclose(pooled[0].detach().cpu(), expected + DEFAULT)
    assert torch.equal(row.ids(), torch.tensor([1]))


def test_click_labels_are_of_the_samples_of_every_key(device: torch.device) -> None:
    params = rst.ShowClickParams(alpha=0, beta=1, admit_threshold=1)
    configs = [
        sequence_config(
            f"t{n}", (f"f{n}",), admit_and_evict_config=rules(showclick_params=params, policy_type=SHOWCLICK)
        )
        for n in range(2)
    ]
    collection = sequences_collection(device, *configs, cache=8)
    apply(collection, torch.optim.SGD)
    batch = rst.with_click_labels(jagged({"f0": [[1], [2, 3]], "f1": [[4, 5], [6]]}), torch.tensor([1, 0]))
    sum(values.values().sum() for values in collection(batch).values()).backward()
    assert [collection.table_ids(f"t{n}").tolist() for n in range(2)] == [[1], [4, 5]]


def test_clicks_admit(device: torch.device) -> None:
    params = rst.ShowClickParams(alpha=0, beta=1, admit_threshold=2)
    collection = sequence(device, showclick_params=params, policy_type=SHOWCLICK)
    batch = rst.with_click_labels(plain([1, 2, 3, 1]), torch.tensor([1, 1, 0, 1]))
    assert defaults(train(collection, batch)) == [False, True, True, False]
    with pytest.raises(ValueError, match="'t0' scores ids by clicks"):
        train(collection, plain([2]))
    labelled = stamped([2, 3], [0, 0])
    rst.with_click_labels(labelled, torch.tensor([[1], [-1]]))
    assert defaults(train(collection, labelled.to(device))) == [False, True]
    with pytest.raises(ValueError, match="one for each of 2 samples"):
        rst.with_click_labels(plain([2, 3]), torch.ones(3, dtype=torch.int64))
    with pytest.raises(TypeError, match="not whole"):
        rst.with_click_labels(plain([2, 3]), torch.tensor([0.5, 1]))
    for value in (2**32 + 1, 2**31, float("inf"), 1e10):
        with pytest.raises(ValueError, match=r"click_labels has .*, allowed are .* to 2147483647"):
            rst.with_click_labels(plain([2, 3]), torch.tensor([1, value]))
    with pytest.raises(TypeError, match="not whole"):
        rst.with_click_labels(plain([2, 3]), torch.tensor([1, float("nan")]))
    narrow = rst.with_click_labels(plain([2, 3]), torch.tensor([1.0, -3.0]).bfloat16())
    labels = clicks_of(narrow)
    assert labels is not None
    assert labels.tolist() == [1, -1]
    unknown = rst.with_click_labels(plain([2, 3]), torch.tensor([-(2**32) + 1, 2]))
    assert defaults(train(collection, unknown)) == [False, False], "2 has its row already, 3 gets one"
    assert defaults(train(collection, rst.with_click_labels(plain([9]), torch.tensor([-(2**32) + 5])))) == [True]


# ---- eviction


def test_ids_leave_by_their_timestamps(device: torch.device) -> None:
    collection = sequence(device, evict_threshold=10, evict_step_interval=2)
    train(collection, stamped([1, 2, 3], [100, 100, 101]))
    train(collection, stamped([2, 4, 2], [120, 111, 105]))  # the latest is 120; the last of 2 is 105
    assert ids(collection) == [4]
    train(collection, stamped([5], [200]))
    assert ids(collection) == [4, 5], "an interval is two steps"
    train(collection, stamped([5, 6], [200, 190]))
    assert ids(collection) == [5, 6], "10 seconds are not more than 10"


def test_a_collection_whose_clock_is_wrong(device: torch.device) -> None:
    collection = sequence(device, evict_threshold=10, evict_step_interval=1)
    train(collection, stamped([1, 2], [100_000, 100_000]))
    assert collection.clocks("t0")["timestamp"] == 100_000
    collection.set_clocks("t0", {"timestamp": 100})
    train(collection, stamped([3], [105]))
    assert ids(collection) == [1, 2, 3]
    with pytest.warns(UserWarning, match="table 't0': 3 of its 4 rows were evicted at once"):
        train(collection, stamped([4], [116]))
    assert ids(collection) == [4]
    with pytest.warns(UserWarning, match=r"table 't0'.*id 5 came with 1000000000000"):
        train(collection, stamped([5], [10**12]))
    assert ids(collection) == [4, 5]


def test_timestamps_that_change_after_the_prefetch(device: torch.device) -> None:
    collection = sequence(device, evict_threshold=10, evict_step_interval=1)
    train(collection, stamped([1], [100]))
    batch = stamped([2], [100])
    collection.prefetch(batch)
    collection.wait_for_plans()
    batch.timestamps.fill_(200)
    train(collection, batch)
    assert ids(collection) == [2]


def test_stats_and_state_after_eviction(device: torch.device) -> None:
    collection = sequence(device, evict_threshold=5, evict_step_interval=1)
    first = train(collection, stamped([1], [0]))
    second = train(collection, stamped([1], [1]))
    assert not torch.equal(first, second)
    train(collection, stamped([9], [100]))
    assert ids(collection) == [9]
    assert collection.cache_stats("t0")["evicted"] == 1
    assert torch.equal(train(collection, stamped([1], [100])), first), "its initial weight"
    assert torch.equal(train(collection, stamped([1], [100])), second), "and no state"


def test_the_lowest_scores_leave(device: torch.device) -> None:
    params = rst.ShowClickParams(evict_percentage=0.5, score_decay=0.5)
    collection = sequence(device, showclick_params=params, policy_type=SHOWCLICK, evict_step_interval=2)
    train(collection, plain([1, 1, 1, 2, 3, 4]))
    assert ids(collection) == [1, 2, 3, 4]
    train(collection, plain([4]))  # (1 + 2) * 0.5: above 2 and 3
    assert ids(collection) == [1, 4]
    scores = collection.embedding.view("t0").row_columns(torch.tensor([1, 4]))["score"]
    assert scores.tolist() == [3.0, 1.5]


def test_a_bound_keeps_the_most_frequent(device: torch.device) -> None:
    collection = sequence(device, max_rows=8)
    for step in range(40):
        train(collection, plain([1, 2, 100 + 3 * step, 101 + 3 * step]))
    assert len(ids(collection)) <= 8
    assert {1, 2} <= set(ids(collection))
    record = 2 * 4 * 4
    for rows, size in (0, 8 * record), (8, 16 * record), (16, 8 * record):
        bounded = sequence(device, max_rows=rows, max_bytes=size)
        for step in range(40):
            train(bounded, plain([1, 2, 100 + 3 * step, 101 + 3 * step]))
        assert ids(bounded) == ids(collection), "the smaller bound counts"


def test_endless_streams_take_bounded_memory(device: torch.device) -> None:
    collection = sequence(device, max_rows=64, admit_threshold=2)
    for step in range(300):
        train(collection, plain([6 * step, 6 * step, *range(6 * step + 1, 6 * step + 5)]))
        if step == 150:
            before = collection.memory_report("t0")
    after = collection.memory_report("t0")
    assert after["candidates"] <= before["candidates"] < 10_000
    assert after["host"] <= before["host"]
    assert after["index"] <= before["index"]


def test_rows_in_flight_stay_for_the_next_time(device: torch.device) -> None:
    collection = sequence(device, evict_idle_steps=1, evict_step_interval=1)
    held = collection(plain([1]))["f0"].values().sum()
    train(collection, plain([2]))
    assert ids(collection) == [1, 2], "1 was not in the last batch, and its update is to come"
    held.backward()
    assert ids(collection) == [2]


def test_rows_in_flight_count_for_the_bound(device: torch.device) -> None:
    """Also those that an idle time would take out."""
    collection = sequence(device, evict_idle_steps=2, evict_step_interval=1, max_rows=3)
    held = collection(plain([1]))["f0"].values().sum()
    for _ in range(2):
        train(collection, plain([2, 3, 4]))
    assert 1 in ids(collection)
    assert len(ids(collection)) <= 3
    held.backward()


def test_eviction_when_asked(device: torch.device) -> None:
    collection = sequence(device, evict_idle_steps=1)
    train(collection, plain([1]))
    train(collection, plain([2]))
    assert ids(collection) == [1, 2], "no interval"
    assert collection.evict("t0") == 1
    assert ids(collection) == [2]


# ---- the module around


def test_counts_move_with_the_tables(device: torch.device) -> None:
    collection = sequence(device, admit_threshold=3, evict_threshold=9)
    train(collection, stamped([1, 1, 1, 2], [5, 6, 7, 8]))
    twin = copy.deepcopy(collection)
    view, other = collection.embedding.view("t0"), twin.embedding.view("t0")
    assert view.clocks() == other.clocks() == {"batches": 1, "steps": 1, "timestamp": 8}
    assert other.row_columns(torch.tensor([1]))["timestamp"].tolist() == [7]
    found, columns = other.candidates()
    assert (found.tolist(), columns["count"].tolist(), columns["timestamp"].tolist()) == ([2], [1], [8])
    assert torch.equal(train(collection, stamped([2, 2], [9, 9])), train(twin, stamped([2, 2], [9, 9])))
    assert ids(collection) == ids(twin) == [1, 2]


def test_a_load_keeps_what_is_counted_of_rows_that_stay(device: torch.device) -> None:
    collection = sequence(device, admit_threshold=2, evict_threshold=9)
    train(collection, stamped([1, 1, 2], [5, 6, 7]))
    saved = collection.state_dict()
    train(collection, stamped([3, 3], [8, 8]))
    collection.load_state_dict(saved)
    view = collection.embedding.view("t0")
    assert ids(collection) == [1]
    assert view.row_columns(torch.tensor([1]))["timestamp"].tolist() == [6]
    assert view.candidates()[0].tolist() == [2]


def test_views_refuse_what_cannot_be(device: torch.device) -> None:
    collection = sequence(device, admit_threshold=2, max_rows=64)
    train(collection, plain([1, 1, 2]))
    view = collection.embedding.view("t0")
    with pytest.raises(KeyError, match="1 ids have no row"):
        view.row_columns(torch.tensor([1, 2]))
    with pytest.raises(KeyError, match="keeps no clicks"):
        view.write_row_columns(torch.tensor([1]), {"clicks": torch.tensor([1])})
    with pytest.raises(ValueError, match="count"):
        view.write_row_columns(torch.tensor([1]), {"count": torch.tensor([-1])})
    with pytest.raises(ValueError, match="count of 0"):
        view.set_candidates(torch.tensor([5]), {})
    assert view.candidates()[0].tolist() == [2]
    with pytest.raises(KeyError, match="no clocks"):
        view.set_clocks({"hours": 1})
    view.write_row_columns(torch.tensor([1]), {"count": torch.tensor([9])})
    assert view.row_columns(torch.tensor([1]))["count"].tolist() == [9]
    view.set_candidates(torch.tensor([5]), {"count": torch.tensor([1]), "last_use": torch.tensor([1])})
    assert defaults(train(collection, plain([5, 2]))) == [False, True]


def test_a_table_that_evicts_by_age_needs_timestamps(device: torch.device) -> None:
    collection = sequence(device, evict_threshold=5)
    with pytest.raises(ValueError, match="'t0' evicts ids by their timestamps"):
        train(collection, plain([1]))
    assert ids(collection) == []
    collection.eval()
    collection(plain([1]))


# ---- pipelines


@dataclass
class Labelled(Pipelineable):
    sparse_features: KeyedJaggedTensor
    click_labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Labelled:
        return Labelled(self.sparse_features.to(device, non_blocking=non_blocking), self.click_labels.to(device))

    def record_stream(self, stream: Any) -> None:
        if self.sparse_features.values().device.type != "cpu":
            self.sparse_features.record_stream(stream)


class Model(torch.nn.Module):
    def __init__(self, device: torch.device, **fields: Any) -> None:
        super().__init__()
        self.tables = sequence(device, **fields)

    def forward(self, batch: Labelled) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.tables(batch.sparse_features)["f0"].values()
        return rows.square().sum(), rows.detach().cpu()


def stream(steps: int) -> Iterator[Labelled]:
    generator = torch.Generator().manual_seed(3)
    for step in range(steps):
        some = torch.randint(0, 12, (6,), generator=generator).tolist()
        labels = torch.randint(0, 2, (6,), generator=generator)
        yield Labelled(stamped(some, [step] * 6), labels)


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_the_pipeline_hands_labels_and_evicts(device: torch.device, depth: int) -> None:
    params = rst.ShowClickParams(alpha=1, beta=1, admit_threshold=3, evict_percentage=0.2, score_decay=0.9)
    model, other = (Model(device, showclick_params=params, policy_type=SHOWCLICK) for _ in range(2))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    cpu = torch.device("cpu")
    pipeline = rst.EmbCacheTrainPipelineSparseDist(
        model, optimizer, cpu, device, evict_step_interval=3, depth=depth, features=lambda batch: batch.sparse_features
    )
    source = stream(20)
    outputs = [pipeline.progress(source) for _ in range(20)]
    other.tables.set_evict_step_interval(3)
    for batch, output in zip(stream(20), outputs, strict=True):
        rst.with_click_labels(batch.sparse_features, batch.click_labels)
        loss, expected = other(batch)
        loss.backward()
        assert torch.equal(output, expected)
    assert ids(model.tables) == ids(other.tables)
    assert model.tables.cache_stats("t0")["evicted"] > 0
    for table in (model.tables, other.tables):
        assert math.isfinite(table.cache_stats("t0")["admitted"])


# ---- batches


def test_what_a_batch_gives_of_itself_has_its_timestamps(device: torch.device) -> None:
    keys, lengths = ["a", "b"], torch.tensor([1, 2, 0, 1])
    stamps = torch.tensor([5, 6, 7, 8])
    batch = rst.KeyedJaggedTensorWithTimestamp(
        keys, torch.tensor([1, 2, 3, 4]), stamps, lengths=lengths, click_labels=torch.tensor([1, 0])
    )
    there = batch.to(device)
    assert isinstance(there, rst.KeyedJaggedTensorWithTimestamp)
    assert there.timestamps.device == there.values().device
    assert there.timestamps.tolist() == stamps.tolist()
    swapped = batch.permute([1, 0])
    assert (swapped.values().tolist(), swapped.timestamps.tolist()) == ([4, 1, 2, 3], [8, 5, 6, 7])
    first, second = batch.split([1, 1])
    assert (first.timestamps.tolist(), second.timestamps.tolist()) == ([5, 6, 7], [8])
    assert second._click_labels.tolist() == [1, 0]
    assert batch["a"].timestamps.tolist() == [5, 6, 7]
    assert batch["b"].to(device).timestamps.tolist() == [8]
    assert {key: jagged.timestamps.tolist() for key, jagged in batch.to_dict().items()} == {"a": [5, 6, 7], "b": [8]}
    mapped = tree_map(lambda part: part if part is None else part.clone(), batch)
    assert mapped.timestamps.tolist() == stamps.tolist()
    assert mapped._click_labels.tolist() == [1, 0]
    if device.type == "cpu":
        return
    batch.pin_memory()
    there.record_stream(torch.accelerator.current_stream())


def test_wrong_batches() -> None:
    with pytest.raises(ValueError, match="shape"):
        stamped([1, 2], [1])
    with pytest.raises(TypeError, match=r"torch\.float32"):
        rst.JaggedTensorWithTimestamp(torch.tensor([1]), timestamps=torch.tensor([0.5]))
    parts = {"values": torch.tensor([1, 2]), "lengths": torch.tensor([2]), "offsets": torch.tensor([0, 2])}
    for name in (*parts, "weights", "timestamps"):
        for make in (rst.JaggedTensorWithTimestamp, lambda **given: rst.KeyedJaggedTensorWithTimestamp(["a"], **given)):
            with pytest.raises(TypeError, match=f"{name} is 'invalid', expected a tensor"):
                make(**{**parts, name: "invalid"})
    good = stamped([1], [1])["f0"]
    other = rst.JaggedTensorWithTimestamp(torch.tensor([1]), lengths=torch.tensor([1]))
    with pytest.raises(ValueError, match=r"\['b'\] have no timestamps"):
        rst.KeyedJaggedTensorWithTimestamp.from_jt_dict({"a": good, "b": other})


@pytest.mark.parametrize("sketch", [0, 400])
def test_reset_parameters_counts_anew(device: torch.device, sketch: int) -> None:
    collection = sequence(device, admit_threshold=3, sketch_bytes=sketch)
    train(collection, stamped([1, 1, 1, 2, 2], [100] * 5))
    assert ids(collection) == [1]
    collection.reset_parameters()
    train(collection, stamped([1, 1, 2], [101] * 3))
    assert ids(collection) == []
    train(collection, stamped([1, 2], [102] * 2))
    assert ids(collection) == [1]
