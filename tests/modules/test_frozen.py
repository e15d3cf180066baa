"""Tables that training only reads, for a while."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from jagged import (
    apply,
    bag_config,
    bags_collection,
    jagged,
    random_bags,
    rows_of,
    sequence_config,
    sequences_collection,
)
from numpy.random import default_rng
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.optim import RowWiseAdagrad

import rec_sdk_torch as rst
from rec_sdk_torch.tbe import TableBatchedEmbedding, TableConfig, TableOptimizer

KEYS = ("f0", "f1")


def batch(step: int) -> KeyedJaggedTensor:
    return jagged(random_bags(default_rng(step), KEYS, 9))


def train(collection: Any, steps: range, depth: int = 0) -> list[torch.Tensor]:
    outputs = []
    for features in rst.prefetch(map(batch, steps), collection, depth=depth):
        output = collection(features)
        values = [part.values() for part in output.values()] if isinstance(output, dict) else [output.values()]
        outputs.append(torch.cat([part.detach().cpu().flatten() for part in values]))
        loss = torch.stack([part.square().sum() for part in values]).sum()
        if loss.requires_grad:
            loss.backward()
    return outputs


def both(
    device: torch.device,
    pooled: bool,
    optimizer: type = torch.optim.Adagrad,
    options: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Any:
    """Two tables of one group."""
    config: Any = bag_config if pooled else sequence_config
    make: Any = bags_collection if pooled else sequences_collection
    tables = make(device, config("t0", ["f0"], **fields), config("t1", ["f1"], **fields), cache=18)
    apply(tables, optimizer, **(options or {}))
    return tables


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("pooled", [True, False])
def test_a_frozen_table_is_read_and_the_other_trains(device: torch.device, pooled: bool, depth: int) -> None:
    ours, free = both(device, pooled), both(device, pooled)
    train(ours, range(3), depth)
    train(free, range(3), depth)
    before = {table: rows_of(ours, table) for table in ("t0", "t1")}
    states = ours.fused_optimizer.state_dict()["state"]
    ours.freeze("t0")
    outputs = train(ours, range(3, 8), depth)
    free_outputs = train(free, range(3, 8), depth)
    assert not all(torch.equal(one, other) for one, other in zip(outputs, free_outputs, strict=True))
    after = rows_of(ours, "t0")
    assert after.keys() == before["t0"].keys(), "ids that it does not know get no row"
    assert all(torch.equal(row, before["t0"][i]) for i, row in after.items())
    assert same(rows_of(ours, "t1"), rows_of(free, "t1"))
    for key, values in ours.fused_optimizer.state_dict()["state"].items():
        if ".t0." in key:
            for name, value in values.items():
                assert name.endswith(".step") or torch.equal(value, states[key][name]), name
    ours.thaw("t0")
    train(ours, range(8, 10), depth)
    assert not same(rows_of(ours, "t0"), after)


def same(one: dict[int, torch.Tensor], other: dict[int, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(row, other[i]) for i, row in one.items())


def test_outputs_are_those_of_evaluation(device: torch.device) -> None:
    tables = both(device, pooled=True)
    train(tables, range(3))
    tables.freeze("t0")
    output = tables(batch(3))["f0"]
    tables.eval()
    assert torch.equal(output, tables(batch(3))["f0"])


def test_parameters_say_it_and_do_it(device: torch.device) -> None:
    tables = both(device, pooled=True)
    train(tables, range(1))
    handles = dict(tables.named_parameters())
    handle = handles["embedding_bags.t0.weight"]
    handle.requires_grad_(False)
    assert not handle.requires_grad
    assert handles["embedding_bags.t1.weight"].requires_grad
    before = rows_of(tables, "t0")
    train(tables, range(1, 3))
    assert same(before, rows_of(tables, "t0"))
    tables.requires_grad_(False)
    assert not tables(batch(3)).values().requires_grad, "nothing of it trains"
    train(tables, range(3, 25), depth=2)
    tables.requires_grad_(True)
    assert all(handle.requires_grad for handle in tables.parameters())
    train(tables, range(25, 27), depth=2)
    assert not same(before, rows_of(tables, "t0"))


def test_sample_weights_have_their_gradient(device: torch.device) -> None:
    plain = EmbeddingBagConfig(
        name="t0", num_embeddings=9, embedding_dim=4, feature_names=["f0"], pooling=PoolingType.SUM
    )
    tables = bags_collection(device, plain, is_weighted=True)
    apply(tables)
    tables.freeze()
    features = jagged({"f0": [[1, 2], [3]]}, {"f0": [[1.0, 2.0], [3.0]]})
    features.weights().requires_grad_()
    tables(features).values().sum().backward()
    rows = rows_of(tables, "t0")
    expected = torch.stack([rows[i].sum() for i in (1, 2, 3)])
    torch.testing.assert_close(features.weights().grad, expected)


def test_no_id_leaves_and_clocks_stand_still(device: torch.device) -> None:
    rules = rst.AdmitAndEvictConfig(evict_idle_steps=2, evict_step_interval=1)
    tables = both(device, pooled=True, admit_and_evict_config=rules)
    tables(jagged({"f0": [[1, 2]], "f1": [[5]]})).values().sum().backward()
    tables.freeze("t0")
    for i in range(6):
        tables(jagged({"f0": [[3]], "f1": [[10 + i]]})).values().sum().backward()
    assert sorted(rows_of(tables, "t0")) == [1, 2]
    assert 5 not in rows_of(tables, "t1")
    tables.thaw("t0")
    tables(jagged({"f0": [[3]], "f1": [[7]]})).values().sum().backward()
    assert sorted(rows_of(tables, "t0")) == [1, 2, 3], "the steps meanwhile do not count"


def test_an_optimizer_that_passes_over_whole_tables(device: torch.device) -> None:
    tables = both(device, True, RowWiseAdagrad, {"step_swap": 4})
    train(tables, range(2))
    tables.freeze("t0")
    before = rows_of(tables, "t0"), rows_of(tables, "t1")
    train(tables, range(2, 6))
    assert same(before[0], rows_of(tables, "t0"))
    assert not same(before[1], rows_of(tables, "t1"))


def test_not_in_the_middle_of_a_window_or_a_step(device: torch.device) -> None:
    tables = both(device, pooled=True)
    output = tables(batch(0))
    with pytest.raises(RuntimeError, match="tables are frozen or thawed"):
        tables.freeze("t0")
    output.values().sum().backward()
    with pytest.raises(KeyError, match="no table is named 't7'"):
        tables.freeze("t7")
    windows = bags_collection(device, bag_config("t0", ["f0"]))
    apply(windows, rst.AccumulateSGD, use_accumulate=True, accumulate_step=2)
    windows(jagged({"f0": [[1]]})).values().sum().backward()
    with pytest.raises(RuntimeError, match="an accumulation window is open; finish it before tables are frozen"):
        windows.freeze()


def test_a_copy_is_frozen_as_well(device: torch.device) -> None:
    tables = both(device, pooled=True)
    train(tables, range(2))
    tables.freeze("t1")
    twin = copy.deepcopy(tables)
    assert [handle.requires_grad for handle in twin.parameters()] == [True, False]
    twin.thaw()
    assert [handle.requires_grad for handle in tables.parameters()] == [True, False]


def test_batches_that_were_prefetched_before_are_planned_anew(device: torch.device) -> None:
    tables = both(device, pooled=True)
    train(tables, range(2))
    ahead = [batch(step) for step in range(2, 4)]
    for features in ahead:
        tables.prefetch(features)
    tables.wait_for_plans()
    tables.freeze("t0")
    tables.reset_cache_stats()
    for features in ahead:
        tables.wait_for_plans()
        tables(features).values().sum().backward()
    planned = sum(len(features["f1"].values()) for features in ahead)
    assert tables.cache_stats()["lookups"] == planned
    assert len(tables.embedding.queue) == 0


def test_batches_that_were_prefetched_may_be_evaluated(device: torch.device) -> None:
    tables = both(device, pooled=True)
    train(tables, range(2))
    tables.freeze("t0")
    tables.eval()
    for step in range(20):
        features = batch(step)
        tables.prefetch(features)
        tables(features)
    assert len(tables.embedding.queue) == 0


@pytest.mark.parametrize("most", ["max_rows", "max_bytes"])
def test_bounds_do_not_hold_for_a_frozen_table(device: torch.device, most: str) -> None:
    bound = 4 if most == "max_rows" else 4 * 32
    tables = both(device, pooled=True, admit_and_evict_config=rst.AdmitAndEvictConfig(**{most: bound}))
    train(tables, range(1))
    tables.freeze("t0")
    ids = torch.arange(30, device="cpu")
    tables.embedding.view("t0").write(ids, {"weight": torch.ones(30, 4, device="cpu")})
    for i in range(3):
        tables(jagged({"f0": [[3]], "f1": [[10 + i]]})).values().sum().backward()
    assert len(rows_of(tables, "t0")) >= 30
    tables.thaw()
    tables(jagged({"f0": [[3]], "f1": [[7]]})).values().sum().backward()
    assert len(rows_of(tables, "t0")) < 30


def test_clocks_are_those_of_a_load(device: torch.device, tmp_path: Path) -> None:
    rules = rst.AdmitAndEvictConfig(evict_idle_steps=3, evict_step_interval=1)
    tables, other = (both(device, pooled=True, admit_and_evict_config=rules) for _ in range(2))
    other.freeze("t0")  # before its first use
    one = jagged({"f0": [[1, 2]], "f1": [[5]]})
    for _ in range(4):
        tables(one).values().sum().backward()
    tables.freeze("t0")
    for i in range(6):
        tables(jagged({"f0": [[3]], "f1": [[10 + i]]})).values().sum().backward()
    assert tables.clocks("t0")["batches"] == 4
    rst.Saver().save(tables, str(tmp_path))
    rst.Saver().load(other, str(tmp_path))
    for i in range(6):
        other(jagged({"f0": [[3]], "f1": [[10 + i]]})).values().sum().backward()
    assert other.clocks("t0") == tables.clocks("t0")
    other.set_clocks("t0", {"batches": 5})
    other.thaw("t0")
    assert other.clocks("t0")["batches"] == 5
    other(jagged({"f0": [[3]], "f1": [[7]]})).values().sum().backward()
    assert sorted(rows_of(other, "t0")) == [1, 2, 3]


@pytest.mark.parametrize("frozen", [(), ("t0",), ("t0", "t1")])
@pytest.mark.parametrize("offsets", [[1, 1, 2, 3, 3], [0, 2, 1, 3, 3], [0, 1, 1, 2, 2], [-1, 1, 2, 3, 3]])
def test_offsets_that_cannot_be(device: torch.device, offsets: list[int], frozen: tuple[str, ...]) -> None:
    adagrad = TableOptimizer.create(torch.optim.Adagrad, {"lr": 0.1})
    tables = [TableConfig(f"t{i}", 40, 4, padding_idx=12 if i else None) for i in range(2)]
    embedding = TableBatchedEmbedding(tables, optimizer=adagrad, device=device, cache=20)
    if frozen:
        embedding.freeze(*frozen)
    with pytest.raises(ValueError, match="offsets"):
        embedding(torch.tensor([10, 11, 12], device="cpu"), torch.tensor(offsets, device="cpu"))
