"""Admission and eviction of ids, tested with collections, pipelines, and batches with timestamps or click labels.

The oracle (tests/tbe/test_oracle.py) covers all rules at every cache size and prefetch depth;
tests/tbe/test_clocks.py covers clocks that invalid timestamps have set wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from batches import jagged, single_ids
from collection_factory import apply, bag_config, bags_collection, sequence_config, sequences_collection
from torch.utils._pytree import tree_map
from torchrec import KeyedJaggedTensor
from torchrec.streamable import Pipelineable
from training import read, train_step

import rec_sdk_torch as rst
from rec_sdk_torch.sparse.jagged_tensor_with_timestamp import clicks_of

SHOWCLICK = rst.AdmitAndEvictPolicyType.POLICY_SHOWCLICK
DEFAULT = 0.5


def rules(**fields: Any) -> rst.AdmitAndEvictConfig:
    return rst.AdmitAndEvictConfig(**{"not_admitted_default_value": DEFAULT, **fields})


def sequence(device: torch.device, **fields: Any) -> rst.EmbCacheEmbeddingCollection:
    collection = sequences_collection(device, sequence_config(admit_and_evict_config=rules(**fields)), cache=8)
    return apply(collection, torch.optim.Adagrad)


def stamped(ids: list[int], seconds: list[int]) -> rst.KeyedJaggedTensorWithTimestamp:
    """Builds a batch with one sample per id."""
    values, stamps = torch.tensor(ids, dtype=torch.int64), torch.tensor(seconds, dtype=torch.int64)
    lengths = torch.ones(len(ids), dtype=torch.int32)
    return rst.KeyedJaggedTensorWithTimestamp.from_jt_dict(
        {"f0": rst.JaggedTensorWithTimestamp(values, lengths=lengths, timestamps=stamps)}
    )


def train_rows(collection: Any, features: KeyedJaggedTensor | list[int]) -> torch.Tensor:
    """Runs a training step with one sample per id; returns the looked-up rows."""
    batch = single_ids(features) if isinstance(features, list) else features
    return train_step(collection, batch).view(-1, 4)


def ids(collection: Any) -> list[int]:
    return sorted(collection.table_ids("t0").tolist())


def defaults(rows: torch.Tensor) -> list[bool]:
    return [bool((row == DEFAULT).all()) for row in rows]


def test_a_batch_that_reaches_the_threshold_reads_the_row(device: torch.device) -> None:
    collection = sequence(device, admit_threshold=3)
    assert defaults(train_rows(collection, [1, 1, 2])) == [True, True, True]
    assert defaults(train_rows(collection, [2, 1, 2])) == [False, False, False]
    assert ids(collection) == [1, 2]
    assert collection.cache_stats("t0")["not_admitted_lookups"] == 3
    assert collection.cache_stats("t0")["admitted"] == 2


def test_bags_pool_the_default_value(device: torch.device) -> None:
    config = bag_config(admit_and_evict_config=rules(admit_threshold=2))
    collection = apply(bags_collection(device, config, cache=8))
    pooled = train_step(collection, jagged({"f0": [[1, 2], [1], []]}))
    expected = read(bags_collection(device, cache=8), single_ids([1]))[0]
    torch.testing.assert_close(pooled[:2], torch.stack([expected + DEFAULT, expected]))
    assert collection.table_ids("t0").tolist() == [1]


def test_click_labels_apply_to_the_samples_of_every_key(device: torch.device) -> None:
    params = rst.ShowClickParams(alpha=0, beta=1, admit_threshold=1)
    fields = {"admit_and_evict_config": rules(showclick_params=params, policy_type=SHOWCLICK)}
    configs = [sequence_config(f"t{n}", (f"f{n}",), **fields) for n in range(2)]
    collection = apply(sequences_collection(device, *configs, cache=8))
    batch = rst.with_click_labels(jagged({"f0": [[1], [2, 3]], "f1": [[4, 5], [6]]}), torch.tensor([1, 0]))
    train_step(collection, batch)
    assert [collection.table_ids(f"t{n}").tolist() for n in range(2)] == [[1], [4, 5]]


def test_clicks_admit(device: torch.device) -> None:
    params = rst.ShowClickParams(alpha=0, beta=1, admit_threshold=2)
    collection = sequence(device, showclick_params=params, policy_type=SHOWCLICK)
    batch = rst.with_click_labels(single_ids([1, 2, 3, 1]), torch.tensor([1, 1, 0, 1]))
    assert defaults(train_rows(collection, batch)) == [False, True, True, False]
    with pytest.raises(ValueError, match="'t0' scores ids by clicks"):
        train_rows(collection, [2])
    labelled = stamped([2, 3], [0, 0])
    rst.with_click_labels(labelled, torch.tensor([[1], [-1]]))
    assert defaults(train_rows(collection, labelled.to(device))) == [False, True]
    labels = clicks_of(rst.with_click_labels(single_ids([2, 3]), torch.tensor([1.0, -3.0]).bfloat16()))
    assert labels is not None
    assert labels.tolist() == [1, -1]
    unknown = rst.with_click_labels(single_ids([2, 3]), torch.tensor([-(2**32) + 1, 2]))
    assert defaults(train_rows(collection, unknown)) == [False, False], "2 has its row already, 3 gets one"
    assert defaults(train_rows(collection, rst.with_click_labels(single_ids([9]), torch.tensor([-(2**32) + 5])))) == [
        True
    ]


def test_invalid_click_labels_are_refused() -> None:
    wrong: list[tuple[Any, type[Exception], str]] = [
        (torch.ones(3, dtype=torch.int64), ValueError, "one for each of 2 samples"),
        (torch.tensor([0.5, 1]), TypeError, "not whole"),
        (torch.tensor([1, float("nan")]), TypeError, "not whole"),
    ]
    large = r"click_labels has .*, allowed are .* to 2147483647"
    wrong += [(torch.tensor([1, value]), ValueError, large) for value in (2**32 + 1, 2**31, float("inf"), 1e10)]
    for labels, error, message in wrong:
        with pytest.raises(error, match=message):
            rst.with_click_labels(single_ids([2, 3]), labels)


def test_timestamps_that_change_after_the_prefetch(device: torch.device) -> None:
    collection = sequence(device, evict_threshold=10, evict_step_interval=1)
    train_rows(collection, stamped([1], [100]))
    batch = stamped([2], [100])
    collection.prefetch(batch)
    collection.wait_for_plans()
    batch.timestamps.fill_(200)
    train_rows(collection, batch)
    assert ids(collection) == [2]


def test_a_bound_keeps_the_most_frequent(device: torch.device) -> None:
    record, kept = 2 * 4 * 4, []
    for rows, size in ((8, 0), (0, 8 * record), (8, 16 * record), (16, 8 * record)):
        collection = sequence(device, max_rows=rows, max_bytes=size)
        for step in range(40):
            train_rows(collection, [1, 2, 100 + 3 * step, 101 + 3 * step])
        kept.append(ids(collection))
    assert len(kept[0]) <= 8
    assert {1, 2} <= set(kept[0])
    assert all(each == kept[0] for each in kept), "the smaller bound counts"


def test_endless_streams_take_bounded_memory(device: torch.device) -> None:
    collection = sequence(device, max_rows=64, admit_threshold=2)
    reports = []
    for step in range(201):
        train_rows(collection, [6 * step, 6 * step, *range(6 * step + 1, 6 * step + 5)])
        if step % 100 == 0:
            reports.append(collection.memory_report("t0"))
    _, before, after = reports
    assert after["candidates"] <= before["candidates"] < 10_000
    assert after["host"] <= before["host"]
    assert after["index"] <= before["index"]


def test_rows_in_flight_count_for_the_bound(device: torch.device) -> None:
    """Rows of a batch in flight are not evicted, although they have been idle long enough, and `max_rows` still
    holds.
    """
    collection = sequence(device, evict_idle_steps=2, evict_step_interval=1, max_rows=3)
    held = collection(single_ids([1]))["f0"].values().sum()
    for _ in range(2):
        train_rows(collection, [2, 3, 4])
    assert 1 in ids(collection)
    assert len(ids(collection)) <= 3
    held.backward()


def test_counts_move_with_the_tables(device: torch.device) -> None:
    collection = sequence(device, admit_threshold=3, evict_threshold=9)
    train_rows(collection, stamped([1, 1, 1, 2], [5, 6, 7, 8]))
    twin = copy.deepcopy(collection)
    view, other = collection.embedding.view("t0"), twin.embedding.view("t0")
    assert view.clocks() == other.clocks() == {"batches": 1, "steps": 1, "timestamp": 8}
    assert other.row_columns(torch.tensor([1]))["timestamp"].tolist() == [7]
    found, columns = other.candidates()
    assert (found.tolist(), columns["count"].tolist(), columns["timestamp"].tolist()) == ([2], [1], [8])
    assert torch.equal(train_rows(collection, stamped([2, 2], [9, 9])), train_rows(twin, stamped([2, 2], [9, 9])))
    assert ids(collection) == ids(twin) == [1, 2]


def test_a_load_keeps_the_counters_of_remaining_rows(device: torch.device) -> None:
    collection = sequence(device, admit_threshold=2, evict_threshold=9)
    train_rows(collection, stamped([1, 1, 2], [5, 6, 7]))
    saved = collection.state_dict()
    train_rows(collection, stamped([3, 3], [8, 8]))
    collection.load_state_dict(saved)
    view = collection.embedding.view("t0")
    assert ids(collection) == [1]
    assert view.row_columns(torch.tensor([1]))["timestamp"].tolist() == [6]
    assert view.candidates()[0].tolist() == [2]


def test_views_refuse_invalid_values(device: torch.device) -> None:
    collection = sequence(device, admit_threshold=2, max_rows=64)
    train_rows(collection, [1, 1, 2])
    view, one = collection.embedding.view("t0"), torch.tensor([1])
    wrong: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: view.row_columns(torch.tensor([1, 2])), KeyError, "1 ids have no row"),
        (lambda: view.write_row_columns(one, {"clicks": one}), KeyError, "does not keep the column clicks"),
        (lambda: view.write_row_columns(one, {"count": -one}), ValueError, "count"),
        (lambda: view.set_candidates(torch.tensor([5]), {}), ValueError, "count of 0"),
        (lambda: view.set_clocks({"hours": 1}), KeyError, "no clocks"),
    ]
    for call, error, message in wrong:
        with pytest.raises(error, match=message):
            call()
    assert view.candidates()[0].tolist() == [2]
    view.write_row_columns(one, {"count": torch.tensor([9])})
    assert view.row_columns(one)["count"].tolist() == [9]
    view.set_candidates(torch.tensor([5]), {"count": one, "last_use": one})
    assert defaults(train_rows(collection, [5, 2])) == [False, True]


def test_a_table_that_evicts_by_age_needs_timestamps(device: torch.device) -> None:
    collection = sequence(device, evict_threshold=5)
    with pytest.raises(ValueError, match="'t0' evicts ids by their timestamps"):
        train_rows(collection, [1])
    assert ids(collection) == []
    collection.eval()
    collection(single_ids([1]))


@dataclass
class Labelled(Pipelineable):
    sparse_features: KeyedJaggedTensor
    click_labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Labelled:
        return Labelled(self.sparse_features.to(device, non_blocking=non_blocking), self.click_labels.to(device))

    def record_stream(self, stream: Any) -> None:
        if self.sparse_features.values().device.type != "cpu":
            self.sparse_features.record_stream(stream)


class Labels(torch.nn.Module):
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
def test_the_pipeline_passes_labels_and_evicts(device: torch.device, depth: int) -> None:
    params = rst.ShowClickParams(alpha=1, beta=1, admit_threshold=3, evict_percentage=0.2, score_decay=0.9)
    model, other = (Labels(device, showclick_params=params, policy_type=SHOWCLICK) for _ in range(2))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    options = {"evict_step_interval": 3, "depth": depth, "features": lambda batch: batch.sparse_features}
    pipeline = rst.EmbCacheTrainPipelineSparseDist(model, optimizer, torch.device("cpu"), device, **options)
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


def test_parts_of_a_batch_keep_its_timestamps(device: torch.device) -> None:
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
    train_rows(collection, stamped([1, 1, 1, 2, 2], [100] * 5))
    assert ids(collection) == [1]
    collection.reset_parameters()
    train_rows(collection, stamped([1, 1, 2], [101] * 3))
    assert ids(collection) == []
    train_rows(collection, stamped([1, 2], [102] * 2))
    assert ids(collection) == [1]
