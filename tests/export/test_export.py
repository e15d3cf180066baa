"""Exported modules and files give the same outputs as the live collection in evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import variable_batch
from collection_factory import POOLED, SEQUENCE, apply, bag_config, bags_collection, index_bag_config
from safetensors.torch import load_file
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from rec_sdk_torch import export

KEYS = ["f0", "f1", "f2"]


def collection(pooled: bool, dim: int = 8) -> Any:
    kind, more = (POOLED, {"pooling": PoolingType.MEAN}) if pooled else (SEQUENCE, {})
    tables = [
        kind.config("t0", ["f0"], num_embeddings=100, embedding_dim=dim),
        kind.config("t1", ["f1"], num_embeddings=100, embedding_dim=dim, **more),
        kind.index("t2", ["f2"], num_embeddings=50, embedding_dim=dim),
    ]
    return apply(kind.collection(None, *tables, cache=40, seed=1), torch.optim.Adagrad, lr=0.1)


def batch(seed: int) -> KeyedJaggedTensor:
    rng = np.random.default_rng(seed)
    lengths = torch.from_numpy(rng.integers(0, 4, 15))
    ends = [0, *lengths.view(3, 5).sum(1).cumsum(0).tolist()]
    ids = rng.integers(0, 50, ends[-1])
    ids[: ends[2]] = (ids[: ends[2]] - 25) * (2**40 + 1)
    return KeyedJaggedTensor(["f0", "f1", "f2"], torch.from_numpy(ids), lengths=lengths)


def values(output: Any, keys: list[str] = KEYS) -> torch.Tensor:
    if isinstance(output, dict):
        return torch.cat([output[key].values() for key in keys])
    return torch.cat([output[key] for key in keys], dim=1)


def trained_on_all(tables: Any, keys: list[str], ids: int = 40) -> Any:
    """Trains a batch with ids from 0 to `ids` - 1 in each key; returns the tables in evaluation."""
    count = len(keys) * ids
    every = torch.arange(ids).repeat(len(keys))
    features = KeyedJaggedTensor(keys, every, torch.ones(count), torch.ones(count, dtype=torch.int64))
    values(tables(features), keys).square().sum().backward()
    return tables.eval()


def trained(pooled: bool) -> Any:
    tables = collection(pooled)
    for seed in range(8):
        values(tables(batch(seed))).square().sum().backward()
    return tables.eval()


@pytest.mark.parametrize("pooled", [True, False])
def test_torchrec_collections_give_the_live_outputs(pooled: bool) -> None:
    tables = trained(pooled)
    exported = export.to_torchrec(tables)
    for seed in range(8):
        assert torch.equal(values(exported(batch(seed))), values(tables(batch(seed))))
    unknown = KeyedJaggedTensor(KEYS, torch.tensor([7, 10**15, 3]), lengths=torch.tensor([1, 1, 1]))
    result = values(exported(unknown)).reshape(3, 8)
    assert result[:2].abs().sum() == 0
    assert torch.equal(result[2], values(tables(unknown)).reshape(3, 8)[2])


def test_embedding_bags_give_the_live_outputs() -> None:
    tables = trained(True)
    id_map, bags = export.to_embedding_bags(tables)
    features = batch(3)
    rows, live = id_map(features), tables(features)
    for table, key in zip(("t0", "t1", "t2"), KEYS, strict=True):
        part = rows[key]
        assert torch.equal(bags[table](part.values(), part.offsets()), live[key])


@pytest.mark.parametrize("inverse", [True, False])
@pytest.mark.parametrize(
    ("pooled", "form"), [(True, "stock"), (True, "qint8"), (True, "bags"), (False, "stock"), (False, "qint8")]
)
def test_keys_with_different_batch_sizes(pooled: bool, form: str, inverse: bool) -> None:
    """With inverse indices, each sample of a pooled output has the bags that its indices select."""
    tables = trained_on_all(collection(pooled), KEYS)
    if form == "bags":
        id_map, bags = export.to_embedding_bags(tables)

        def exported(features: KeyedJaggedTensor) -> Any:
            rows = id_map(features)
            parts = zip(("t0", "t1", "t2"), KEYS, strict=True)
            return {key: bags[table](rows[key].values(), rows[key].offsets()) for table, key in parts}
    else:
        exported = export.to_torchrec(tables)
        exported = exported if form == "stock" else export.quantized(exported)
    for seed in range(6):
        features = variable_batch(np.random.default_rng(seed), KEYS, 40, inverse=inverse)
        if pooled and not inverse:
            with pytest.raises(ValueError, match="pooled outputs need inverse_indices"):
                exported(features)
            continue
        live, found = tables(features), exported(features)
        for key in KEYS:
            of_key, right = (x[key] if pooled else x[key].values() for x in (found, live))
            torch.testing.assert_close(of_key, right, rtol=0, atol=0.05 if form == "qint8" else 0)
            assert pooled or found[key].lengths().tolist() == live[key].lengths().tolist()


def test_weights_of_samples_that_share_a_bag() -> None:
    config = bag_config("t0", ["f0", "f1"], num_embeddings=100, embedding_dim=8)
    live = apply(bags_collection(None, config, cache=40, is_weighted=True, seed=1), lr=0.1)
    exported = export.to_torchrec(trained_on_all(live, ["f0", "f1"]))
    features = variable_batch(np.random.default_rng(0), ["x", "f1", "f0"], 40, weighted=True)
    torch.testing.assert_close(exported(features).values(), live(features).values(), rtol=1e-6, atol=1e-7)
    features = KeyedJaggedTensor(
        features.keys(),
        features.values(),
        features.weights(),
        features.lengths(),
        stride_per_key_per_rank=features.stride_per_key_per_rank(),
        inverse_indices=(["f0", "x"], torch.zeros(2, 6, dtype=torch.int64)),
    )
    with pytest.raises(ValueError, match=r"inverse_indices have keys \['f0', 'x'\]"):
        exported(features)


def test_a_weighted_mean_is_refused() -> None:
    """torch's EmbeddingBag, and so TorchRec's collection, does not support MEAN pooling with per-sample weights."""
    config = index_bag_config(embedding_dim=8, pooling=PoolingType.MEAN)
    live = bags_collection(None, config, cache=40, is_weighted=True)
    for call in export.to_torchrec, export.to_embedding_bags:
        with pytest.raises(ValueError, match="table 't0': a MEAN with weights per sample cannot be exported"):
            call(live)


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint4x2])
def test_quantized_outputs_are_bounded(pooled: bool, dtype: torch.dtype) -> None:
    tables = trained(pooled)
    exported = export.to_torchrec(tables)
    small = export.quantized(exported, dtype)
    weights = torch.cat(list(exported.collection.state_dict().values()))
    step = float((weights.amax(1) - weights.amin(1)).max()) / (255 if dtype == torch.qint8 else 15)
    longest = 3 if pooled else 1
    for seed in range(4):
        error = (values(small(batch(seed))) - values(tables(batch(seed)))).abs().max()
        assert 0 < error <= longest * step
    assert not hasattr(exported.collection, "qconfig")
    with pytest.raises(ValueError, match="allowed are"):
        export.quantized(exported, torch.float16)


@pytest.mark.parametrize(("dtype", "codes"), [(torch.qint8, 255), (torch.quint4x2, 15)])
@pytest.mark.parametrize(("scale", "offset"), [(1.0, 0.0), (1e-3, 100.0), (1e-5, 0.0), (1e-8, 0.0), (1e-6, 0.5)])
def test_quantization_errors_match_the_docs(scale: float, offset: float, dtype: torch.dtype, codes: int) -> None:
    tables = bags_collection(None, index_bag_config(num_embeddings=64, embedding_dim=8), cache=64).eval()
    rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(1)) * scale + offset
    tables.load_state_dict({"embedding_bags.t0.weight": rows})
    small = export.quantized(export.to_torchrec(tables), dtype)
    features = KeyedJaggedTensor(["f0"], torch.arange(64), lengths=torch.ones(64, dtype=torch.int64))
    error = (small(features).values().double() - rows.double()).abs().amax(1)
    lowest, width = rows.double().amin(1), rows.double().amax(1) - rows.double().amin(1)
    assert (error <= width / codes / 2 + (width + lowest.abs()) / 2048 + 1e-5).all()


def test_arrays_and_safetensors(tmp_path: Path) -> None:
    tables = trained(True)
    arrays = export.to_arrays(tables)
    files = export.to_safetensors(tables, tmp_path)
    state = tables.state_dict()
    assert [file.name for file in files] == [f"t{i}.safetensors" for i in range(3)]
    for file in files:
        ids, weight = arrays[file.stem]
        saved = load_file(file)
        assert np.array_equal(saved["ids"].numpy(), ids)
        assert np.array_equal(saved["weight"].numpy(), weight)
        order = saved["ids"].argsort()
        assert torch.equal(state[f"embedding_bags.{file.stem}.weight"], saved["weight"][order])
    assert state["embedding_bags.t0.ids"].tolist() == sorted(arrays["t0"][0].tolist())
    with pytest.raises(FileExistsError, match=r"t0\.safetensors"):
        export.to_safetensors(tables, tmp_path)
    with pytest.raises(TypeError, match="no tables to export"):
        export.to_arrays(torch.nn.Linear(1, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize(("dtype", "width"), [(torch.qint8, 2), (torch.quint4x2, 4)])
def test_widths_that_cannot_be_quantized_are_named(pooled: bool, dtype: torch.dtype, width: int) -> None:
    """The reference is the set of widths that fbgemm accepts."""
    for dim in range(1, 10):
        exported = export.to_torchrec(collection(pooled, dim))
        if dim % width:
            message = rf"multiple of {width}: tables {{'t0': {dim}, 't1': {dim}, 't2': {dim}}}"
            with pytest.raises(ValueError, match=message):
                export.quantized(exported, dtype)
            assert not hasattr(exported.collection, "qconfig")
        else:
            assert values(export.quantized(exported, dtype)(batch(0))).shape[-1] % dim == 0
