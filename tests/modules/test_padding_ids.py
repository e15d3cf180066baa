"""Padding ids: results match torch's modules with a `padding_idx`; invalid padding ids raise errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from batches import jagged, random_bags, random_weights, single_ids
from collection_factory import (
    POOLED,
    SEQUENCE,
    Kind,
    apply,
    bag_config,
    bags_collection,
    index_bag_config,
    sequences_collection,
)
from torchrec import KeyedJaggedTensor, PoolingType
from training import train_step

from rec_sdk_torch import export
from rec_sdk_torch.tbe import TableConfig

ROWS = 12
PADDING = 3


def tables(kind: Kind, **fields: Any) -> list[Any]:
    """Builds two tables that share a feature, one with a padding id."""
    both = {"num_embeddings": ROWS, **fields}
    return [kind.index("t0", ["f0", "f1"], **both), kind.index("t1", ["f1"], **both)]


def weights_of(collection: Any) -> list[torch.Tensor]:
    state = collection.state_dict()
    return [state[key].cpu() for key in state if key.endswith("weight")]


def batch(seed: int, weighted: bool = False, device: torch.device | None = None) -> KeyedJaggedTensor:
    rng = np.random.default_rng(seed)
    bags = random_bags(rng, ["f0", "f1", "none"], 5, longest=6)
    made = jagged(bags, random_weights(rng, bags) if weighted else None)
    return made if device is None else made.to(device)


def lookups(features: KeyedJaggedTensor, key: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    part = features[key]
    weights = part.weights_or_none()
    return part.values().cpu(), part.offsets().cpu(), None if weights is None else weights.cpu()


@pytest.mark.parametrize("prefetched", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "weighted"])
def test_bags_match_torch(device: torch.device, mode: str, on_device: bool, prefetched: bool) -> None:
    weighted = mode == "weighted"
    pooling = PoolingType.MEAN if mode == "mean" else PoolingType.SUM
    configs = tables(POOLED, pooling=pooling)
    ours = apply(bags_collection(device, *configs, is_weighted=weighted, cache=1.0, padding_idx={"t0": PADDING}))
    expected = weights_of(ours)
    for weight in expected:
        weight.requires_grad_()
    for step in range(4):
        features = batch(step, weighted, device if on_device else None)
        if prefetched:
            ours.prefetch(features)
        output = ours(features).values().cpu()
        parts = []
        for table, key in ((0, "f0"), (0, "f1"), (1, "f1")):
            ids, offsets, weights = lookups(features, key)
            padding = PADDING if table == 0 else None
            options = {"per_sample_weights": weights, "include_last_offset": True, "padding_idx": padding}
            mode_of_bag = "mean" if mode == "mean" else "sum"
            parts.append(torch.nn.functional.embedding_bag(ids, expected[table], offsets, mode=mode_of_bag, **options))
        reference = torch.cat(parts, 1)
        torch.testing.assert_close(output, reference)
        (output * torch.arange(1.0, 13.0)).sum().backward()
        (reference * torch.arange(1.0, 13.0)).sum().backward()
        with torch.no_grad():
            for weight in expected:
                assert weight.grad is not None
                weight.sub_(0.5 * weight.grad)
                weight.grad = None
    for weight, found in zip(expected, weights_of(ours), strict=True):
        torch.testing.assert_close(found, weight.detach())


@pytest.mark.parametrize("need_indices", [False, True])
def test_sequences_have_zeros_and_no_gradient(device: torch.device, need_indices: bool) -> None:
    ours = sequences_collection(
        device, *tables(SEQUENCE), cache=1.0, padding_idx={"t0": PADDING}, need_indices=need_indices
    )
    apply(ours)
    before = weights_of(ours)
    features = jagged({"f0": [[1, PADDING], [PADDING]], "f1": [[PADDING, 4, 1], []]})
    output = ours(features)
    for name, table, key in (("f0", 0, "f0"), ("f1@t0", 0, "f1"), ("f1@t1", 1, "f1")):
        ids, _, _ = lookups(features, key)
        rows = before[table][ids]
        if table == 0:
            rows[ids == PADDING] = 0
        assert torch.equal(output[name].values().cpu(), rows)
        assert output[name].lengths().tolist() == features[key].lengths().tolist()
        if need_indices:
            assert output[name].weights().tolist() == ids.tolist()
    torch.cat([part.values() for part in output.values()]).sum().backward()
    after = weights_of(ours)
    assert torch.equal(after[0][PADDING], before[0][PADDING])
    assert not torch.equal(after[1][PADDING], before[1][PADDING]), "which means something in the other table"


def test_a_padding_id_gets_no_row_and_is_not_counted(device: torch.device) -> None:
    ours = apply(bags_collection(device, padding_idx=-1))
    train_step(ours, jagged({"f0": [[-1, 7], [-1], []]}))
    assert ours.table_ids("t0").tolist() == [7]
    assert ours.cache_stats()["lookups"] == 1
    train_step(ours, single_ids([-1, -1, -1]))  # the batch consists of padding ids only
    assert not ours.eval()(single_ids([-1, -1, -1])).values().any()


def test_a_padding_id_outside_an_index_table_is_no_error(device: torch.device) -> None:
    config = index_bag_config(num_embeddings=ROWS)
    ours = bags_collection(device, config, padding_idx=-1, bounds_check_mode="fatal").eval()
    assert not ours(single_ids([-1])).values().any()
    with pytest.raises(IndexError):
        ours(single_ids([-2]))


def test_gradients_of_sample_weights(device: torch.device) -> None:
    ours = apply(bags_collection(device, is_weighted=True, padding_idx=PADDING))
    features = jagged({"f0": [[PADDING, 1], [PADDING]]}, {"f0": [[2.0, 3.0], [4.0]]})
    features.weights().requires_grad_()
    train_step(ours, features, square=True)
    assert features.weights().grad is not None
    assert (features.weights().grad != 0).tolist() == [False, True, False]


def test_padding_ids_in_prefetched_batches(device: torch.device) -> None:
    ours = apply(bags_collection(device, padding_idx=PADDING, cache=1.0))
    for features in map(batch, range(3)):
        ours.prefetch(features)
        ours.wait_for_plans()
        train_step(ours, features)
    assert ours.cache_stats()["depth_reached"] == 1, "the plan was made ahead, and no other"
    assert ours.cache_stats()["batches"] == 3


@pytest.mark.parametrize("padding", [1.5, 2**63, "0"])
def test_an_invalid_padding_id_is_refused(padding: Any) -> None:
    with pytest.raises(ValueError, match=r"padding_idx is .* expected an int64 or None"):
        TableConfig("t", 4, 4, padding_idx=padding)
    with pytest.raises(ValueError, match=r"padding_idx names tables \['t9'\], only \['t0'\] are there"):
        bags_collection(None, padding_idx={"t9": 0})


@pytest.mark.parametrize("config", [bag_config, index_bag_config])
def test_exported_sums_read_zeros(config: Any) -> None:
    ours = apply(bags_collection(torch.device("cpu"), config(num_embeddings=ROWS), padding_idx=PADDING))
    features = jagged({"f0": [[PADDING, 1], [PADDING], [0, 4]]})
    train_step(ours, features)
    exported = export.to_torchrec(ours.eval())
    torch.testing.assert_close(exported(features).values(), ours(features).values())
    outside = exported(jagged({"f0": [[ROWS], [-1, PADDING], [0, 2 * ROWS]]})).values()
    torch.testing.assert_close(outside, exported(jagged({"f0": [[], [], [0]]})).values())


def test_means_are_not_exported() -> None:
    ours = bags_collection(torch.device("cpu"), bag_config(pooling=PoolingType.MEAN), padding_idx=PADDING)
    for write in (export.to_torchrec, export.to_embedding_bags):
        with pytest.raises(ValueError, match="'t0': a MEAN with padding_idx"):
            write(ours)
