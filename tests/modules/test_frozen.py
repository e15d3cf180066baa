"""Frozen tables, which training reads but does not update."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import jagged, numbered, random_bags
from collection_factory import EACH_KIND, POOLED, Kind, apply, bags_collection, index_bag_config
from embeddings import embedding_of
from numpy.random import default_rng
from torchrec import KeyedJaggedTensor
from torchrec.optim import RowWiseAdagrad
from training import equal_rows, output_values, rows_of, state_of, train, train_step

import rec_sdk_torch as rst
from rec_sdk_torch.tbe import TableConfig

KEYS = ("f0", "f1")


def batch(step: int) -> KeyedJaggedTensor:
    return jagged(random_bags(default_rng(step), KEYS, 9))


def train_prefetched(collection: Any, steps: range, depth: int = 0) -> list[torch.Tensor]:
    """Trains on prefetched batches; if all tables are frozen, the batches are only looked up."""
    outputs = []
    for features in rst.prefetch(map(batch, steps), collection, depth=depth):
        output = output_values(collection(features))
        if output.requires_grad:
            output.square().sum().backward()
        outputs.append(output.detach())
    return outputs


def two_tables(device: torch.device, kind: Kind = POOLED, optimizer: type = torch.optim.Adagrad, **fields: Any) -> Any:
    """Builds two tables in one group; `step_swap` is an option of the optimizer, other keywords are fields of
    the configs.
    """
    keywords = {name: fields.pop(name) for name in ("step_swap",) if name in fields}
    tables = kind.collection(device, kind.config(**fields), kind.config("t1", ["f1"], **fields), cache=18)
    return apply(tables, optimizer, **keywords)


def look_up(tables: Any, first: int, *others: int) -> None:
    """Trains one batch per id of t1, each with the same id of t0."""
    for other in others:
        train_step(tables, jagged({"f0": [[first]], "f1": [[other]]}))


@pytest.mark.parametrize("depth", [0, 2])
@EACH_KIND
def test_a_frozen_table_is_read_and_the_other_trains(device: torch.device, kind: Kind, depth: int) -> None:
    ours, free = two_tables(device, kind), two_tables(device, kind)
    train_prefetched(ours, range(3), depth)
    train_prefetched(free, range(3), depth)
    before, states = rows_of(ours), state_of(ours)["states"]
    ours.freeze("t0")
    outputs, free_outputs = train_prefetched(ours, range(3, 8), depth), train_prefetched(free, range(3, 8), depth)
    assert not all(map(torch.equal, outputs, free_outputs))
    after = rows_of(ours)
    assert equal_rows(after, before), "and ids that it does not know get no row"
    assert equal_rows(rows_of(ours, "t1"), rows_of(free, "t1"))
    for key, values in state_of(ours)["states"].items():
        for name, value in values.items() if ".t0." in key else ():
            assert name.endswith(".step") or torch.equal(value, states[key][name]), name
    ours.thaw("t0")
    train_prefetched(ours, range(8, 10), depth)
    assert not equal_rows(rows_of(ours), after)


def test_outputs_of_a_frozen_table_match_evaluation(device: torch.device) -> None:
    tables = two_tables(device)
    train_prefetched(tables, range(3))
    tables.freeze("t0")
    output = tables(batch(3))["f0"]
    assert torch.equal(output, tables.eval()(batch(3))["f0"])


def test_requires_grad_of_parameters_freezes_tables(device: torch.device) -> None:
    tables = two_tables(device)
    train_prefetched(tables, range(1))
    handles = dict(tables.named_parameters())
    handles["embedding_bags.t0.weight"].requires_grad_(False)
    assert not handles["embedding_bags.t0.weight"].requires_grad
    assert handles["embedding_bags.t1.weight"].requires_grad
    before = rows_of(tables)
    train_prefetched(tables, range(1, 3))
    assert equal_rows(before, rows_of(tables))
    tables.requires_grad_(False)
    assert not tables(batch(3)).values().requires_grad, "nothing of it trains"
    train_prefetched(tables, range(3, 25), depth=2)
    tables.requires_grad_(True)
    assert all(handle.requires_grad for handle in tables.parameters())
    train_prefetched(tables, range(25, 27), depth=2)
    assert not equal_rows(before, rows_of(tables))


def test_sample_weights_have_their_gradient(device: torch.device) -> None:
    tables = apply(bags_collection(device, index_bag_config(num_embeddings=9), is_weighted=True))
    tables.freeze()
    features = jagged({"f0": [[1, 2], [3]]}, {"f0": [[1.0, 2.0], [3.0]]})
    features.weights().requires_grad_()
    train_step(tables, features)
    rows = rows_of(tables)
    torch.testing.assert_close(features.weights().grad, torch.stack([rows[i].sum() for i in (1, 2, 3)]))


def test_a_frozen_table_evicts_nothing_and_its_clocks_stop(device: torch.device) -> None:
    rules = rst.AdmitAndEvictConfig(evict_idle_steps=2, evict_step_interval=1)
    tables = two_tables(device, admit_and_evict_config=rules)
    train_step(tables, jagged({"f0": [[1, 2]], "f1": [[5]]}))
    tables.freeze("t0")
    look_up(tables, 3, *range(10, 16))
    assert sorted(rows_of(tables)) == [1, 2]
    assert 5 not in rows_of(tables, "t1")
    tables.thaw("t0")
    look_up(tables, 3, 7)
    assert sorted(rows_of(tables)) == [1, 2, 3], "the steps meanwhile do not count"


def test_averages_of_whole_tables_skip_frozen_tables(device: torch.device) -> None:
    tables = two_tables(device, optimizer=RowWiseAdagrad, step_swap=4)
    train_prefetched(tables, range(2))
    tables.freeze("t0")
    before = rows_of(tables), rows_of(tables, "t1")
    train_prefetched(tables, range(2, 6))
    assert equal_rows(before[0], rows_of(tables))
    assert not equal_rows(before[1], rows_of(tables, "t1"))


def test_freezing_within_a_window_or_step_is_refused(device: torch.device) -> None:
    tables = two_tables(device)
    output = tables(batch(0))
    with pytest.raises(RuntimeError, match="tables are frozen or thawed"):
        tables.freeze("t0")
    output.values().sum().backward()
    with pytest.raises(KeyError, match="no table is named 't7'"):
        tables.freeze("t7")
    windows = apply(bags_collection(device), window=2)
    train_step(windows, numbered(1))
    with pytest.raises(RuntimeError, match="an accumulation window is open; finish it before tables are frozen"):
        windows.freeze()


def test_a_copy_is_frozen_as_well(device: torch.device) -> None:
    tables = two_tables(device)
    train_prefetched(tables, range(2))
    tables.freeze("t1")
    twin = copy.deepcopy(tables)
    assert [handle.requires_grad for handle in twin.parameters()] == [True, False]
    twin.thaw()
    assert [handle.requires_grad for handle in tables.parameters()] == [True, False]


def test_batches_prefetched_before_freezing_are_replanned(device: torch.device) -> None:
    tables = two_tables(device)
    train_prefetched(tables, range(2))
    ahead = [batch(step) for step in range(2, 4)]
    for features in ahead:
        tables.prefetch(features)
    tables.wait_for_plans()
    tables.freeze("t0")
    tables.reset_cache_stats()
    for features in ahead:
        tables.wait_for_plans()
        train_step(tables, features)
    assert tables.cache_stats()["lookups"] == sum(len(features["f1"].values()) for features in ahead)
    assert len(tables.embedding.queue) == 0


def test_batches_that_were_prefetched_may_be_evaluated(device: torch.device) -> None:
    tables = two_tables(device)
    train_prefetched(tables, range(2))
    tables.freeze("t0")
    tables.eval()
    for features in map(batch, range(20)):
        tables.prefetch(features)
        tables(features)
    assert len(tables.embedding.queue) == 0


@pytest.mark.parametrize("bound", [{"max_rows": 4}, {"max_bytes": 4 * 32}], ids=str)
def test_bounds_do_not_hold_for_a_frozen_table(device: torch.device, bound: dict[str, int]) -> None:
    tables = two_tables(device, admit_and_evict_config=rst.AdmitAndEvictConfig(**bound))
    train_prefetched(tables, range(1))
    tables.freeze("t0")
    tables.embedding.view("t0").write(torch.arange(30, device="cpu"), {"weight": torch.ones(30, 4, device="cpu")})
    look_up(tables, 3, 10, 11, 12)
    assert len(rows_of(tables)) >= 30
    tables.thaw()
    look_up(tables, 3, 7)
    assert len(rows_of(tables)) < 30


def test_a_frozen_table_takes_the_clocks_of_a_load(device: torch.device, tmp_path: Path) -> None:
    rules = rst.AdmitAndEvictConfig(evict_idle_steps=3, evict_step_interval=1)
    tables, other = (two_tables(device, admit_and_evict_config=rules) for _ in range(2))
    other.freeze("t0")  # freezes t0 before its first use
    train(tables, [jagged({"f0": [[1, 2]], "f1": [[5]]})] * 4)
    tables.freeze("t0")
    look_up(tables, 3, *range(10, 16))
    assert tables.clocks("t0")["batches"] == 4
    rst.Saver().save(tables, tmp_path)
    rst.Saver().load(other, tmp_path)
    look_up(other, 3, *range(10, 16))
    assert other.clocks("t0") == tables.clocks("t0")
    other.set_clocks("t0", {"batches": 5})
    other.thaw("t0")
    assert other.clocks("t0")["batches"] == 5
    look_up(other, 3, 7)
    assert sorted(rows_of(other)) == [1, 2, 3]


@pytest.mark.parametrize("frozen", [(), ("t0",), ("t0", "t1")])
@pytest.mark.parametrize("offsets", [[1, 1, 2, 3, 3], [0, 2, 1, 3, 3], [0, 1, 1, 2, 2], [-1, 1, 2, 3, 3]])
def test_offsets_that_cannot_be(device: torch.device, offsets: list[int], frozen: tuple[str, ...]) -> None:
    tables = [TableConfig(f"t{i}", 40, 4, padding_idx=12 if i else None) for i in range(2)]
    embedding = embedding_of(*tables, device=device, cache=20)
    if frozen:
        embedding.freeze(*frozen)
    with pytest.raises(ValueError, match="offsets"):
        embedding(torch.tensor([10, 11, 12], device="cpu"), torch.tensor(offsets, device="cpu"))
