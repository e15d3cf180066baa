"""Pooled lookups of TableReader: the bits of the operator on rows that `lookup` gives, for any number of threads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from served_tables import DTYPES, make, train
from threads import threads

import rec_sdk_torch  # noqa: F401  # its operators
from rec_sdk_torch.export import quantize_save
from rec_sdk_torch.saves.format.errors import CheckpointError
from rec_sdk_torch.saves.format.index import index_path
from rec_sdk_torch.saves.saver import Saver
from rec_sdk_torch.serving import TableReader
from rec_sdk_torch.tbe import TableBatchedEmbedding, TableConfig, TableOptimizer

BAGS = 3000


def pooled(rows: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None, mean: bool) -> torch.Tensor:
    """The operator, of rows of which each is looked up once."""
    dim = rows.shape[1]
    out = torch.full((len(offsets) - 1, dim), torch.nan)
    slots = torch.arange(len(rows), dtype=torch.int32)
    columns, means = torch.zeros(1, dtype=torch.int64), torch.tensor([mean])
    torch.ops.rec_sdk.lookup_pooled(rows, slots, offsets, weights, columns, means, 0, out)
    return out


def bags(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, some of which are no rows, offsets and weights: empty bags, short ones and two long ones."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 7, (BAGS,), generator=draw)
    lengths[:3] = lengths[-2:] = 0
    lengths[100], lengths[2000] = 5000, 777
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    count = int(offsets[-1])
    return torch.randint(-20, 400, (count,), generator=draw), offsets, torch.rand(count, generator=draw)


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("dim", [5, 64, 200])
def test_bags_have_the_bits_of_the_operator(tmp_path: Path, bits: int | None, dim: int) -> None:
    tables = [TableConfig(name, 1000, dim, weight_dtype=dtype, init_min=-0.1) for name, dtype in DTYPES.items()]
    optimizer = TableOptimizer.create(torch.optim.SGD, {"lr": 0.1})
    embedding = TableBatchedEmbedding(tables, optimizer=optimizer, cache=200)
    for name, dtype in DTYPES.items():
        embedding.view(name).write(torch.arange(300), {"weight": torch.randn(300, dim).to(dtype)})
    folder = tmp_path / "saves"
    Saver().save(embedding, folder)
    if bits is not None:
        folder = quantize_save(folder, tmp_path / "small", bits).save
    ids, offsets, weights = bags(dim)
    for name in DTYPES:
        reader = TableReader(folder, name, default=0.1)
        rows = reader.lookup(ids)
        for pooling in ("sum", "mean"):
            for factors in (None, weights):
                expected = pooled(rows, offsets, factors, pooling == "mean")
                for count in (1, 3):
                    with threads(count):
                        assert torch.equal(reader.lookup_pooled(ids, offsets, factors, pooling), expected)
        array = reader.lookup_pooled(ids.numpy(), offsets.int().numpy(), weights.numpy(), pooling="mean")
        assert isinstance(array, np.ndarray)
        assert np.array_equal(array, expected.numpy())
        assert reader.lookup_pooled(ids[:0], torch.zeros(3, dtype=torch.int64)).tolist() == [[0.0] * dim] * 2
        assert reader.lookup_pooled(ids[:0], torch.zeros(1, dtype=torch.int64)).shape == (0, dim)


def test_wrong_arguments(tmp_path: Path) -> None:
    Saver().save(make(), tmp_path)
    reader = TableReader(tmp_path, "c")
    ids, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3])
    for wrong in ([0, 1], [1, 3], [0, 2, 1, 3], []):
        with pytest.raises(ValueError, match="ascend from 0 to the number of ids, 3"):
            reader.lookup_pooled(ids, torch.tensor(wrong, dtype=torch.int64))
    with pytest.raises(ValueError, match="expected 'sum' or 'mean'"):
        reader.lookup_pooled(ids, offsets, pooling="max")
    with pytest.raises(ValueError, match=r"expected floats \[3\]"):
        reader.lookup_pooled(ids, offsets, torch.ones(2))
    with pytest.raises(ValueError, match="one dimension"):
        reader.lookup_pooled(ids[None], offsets)
    with pytest.raises(TypeError, match="offsets are"):
        reader.lookup_pooled(ids, offsets.float())


@pytest.mark.parametrize("count", [1, 4])
def test_a_damaged_index_is_named_by_every_thread(tmp_path: Path, count: int) -> None:
    embedding = make()
    train(embedding, range(300))
    save = Path(Saver().save(embedding, tmp_path))
    index = index_path(save, "a")
    entries = np.frombuffer(index.read_bytes(), np.uint32).copy()
    entries[16 + 3 :: 4] = 10**9  # rows that are not there
    index.write_bytes(entries.tobytes())
    ids, offsets, _ = bags(1)
    with threads(count), pytest.raises(CheckpointError, match=index.name):
        TableReader(tmp_path, "a").lookup_pooled(ids, offsets)
