"""Where rows start: the initializers, the seed, and `init_fn`."""

from __future__ import annotations

import copy
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from jagged import (
    apply,
    bag_config,
    bags_collection,
    jagged,
    read,
    rows_of,
    sequence_config,
    sequences_collection,
    single_ids,
    train_step,
)
from torchrec import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_configs import DataType

import rec_sdk_torch as rst
from rec_sdk_torch import HashEmbeddingBagCollection, HashEmbeddingBagConfig, InitializerType
from rec_sdk_torch.modules.conventions import conventions

IDS = (-(2**63), -1, 0, 1, 5, 1000, 2**63 - 1)


def initial(device: torch.device, ids: Any = IDS, **fields: Any) -> torch.Tensor:
    options = {name: fields.pop(name) for name in ("cache", "seed") if name in fields}
    return read(bags_collection(device, bag_config(**fields), **options), single_ids(list(ids)))


def test_linear(device: torch.device) -> None:
    linear = {"initializer_type": InitializerType.LINEAR}
    rows = initial(device, embedding_dim=5, weight_init_min=-1.0, weight_init_max=3.0, **linear)
    assert torch.equal(rows, torch.tensor([-1.0, 0.0, 1.0, 2.0, 3.0]).expand(len(IDS), 5))
    edge = 40**-0.5
    rows = initial(device, embedding_dim=3, **linear)
    torch.testing.assert_close(rows, torch.tensor([-edge, 0.0, edge]).expand(len(IDS), 3))
    rows = initial(device, embedding_dim=1, weight_init_min=0.125, **linear)
    assert torch.equal(rows, torch.full((len(IDS), 1), 0.125))


def hash_collection(device: torch.device, **fields: Any) -> HashEmbeddingBagCollection:
    """A collection of one whole table; torch's generator seeds it."""
    config = HashEmbeddingBagConfig(name="t0", num_embeddings=40, embedding_dim=4, feature_names=["f0"], **fields)
    torch.manual_seed(0)
    return HashEmbeddingBagCollection([config], device=device)


DEFAULT = {"initializer_type": None}
MAKERS = {
    "pooled": lambda device, **fields: bags_collection(device, bag_config(**fields)),
    "sequence": lambda device, **fields: sequences_collection(device, sequence_config(**fields)),
    "hash": hash_collection,
}


@pytest.mark.parametrize("kind", list(MAKERS))
def test_the_default_has_torchrecs_bounds(device: torch.device, kind: str) -> None:
    """Each id has a row of its own, uniform within plus and minus sqrt(1 / num_embeddings)."""
    default, uniform = (
        read(MAKERS[kind](device, **fields), single_ids(range(30)))
        for fields in (DEFAULT, {"initializer_type": InitializerType.UNIFORM})
    )
    assert torch.equal(default, uniform)
    assert default.unique().numel() == 120
    assert 0.9 * 40**-0.5 < default.abs().max() <= 40**-0.5


@pytest.mark.parametrize("kind", list(MAKERS))
def test_the_default_is_announced_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a config gives neither an initializer nor a function; the warning says how to silence it."""
    monkeypatch.setattr(conventions, "announces_default", True)
    cpu = torch.device("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MAKERS[kind](cpu, init_fn=torch.nn.init.ones_, **DEFAULT)
        MAKERS[kind](cpu, initializer_type=InitializerType.LINEAR)
        with pytest.warns(rst.ConfigurationWarning) as caught:
            MAKERS[kind](cpu, **DEFAULT)
        MAKERS[kind](cpu, **DEFAULT)
    (message,) = (str(each.message) for each in caught)
    for part in ("table 't0'", "UNIFORM", "initializer_type=InitializerType.UNIFORM", "LINEAR", "a save does not hold"):
        assert part in message
    assert Path(caught[0].filename).name in ("jagged.py", "test_initial_weights.py")  # not a file of the package


@pytest.mark.parametrize("kind", ["pooled", "sequence"])
def test_a_load_keeps_the_rows_of_another_initializer(device: torch.device, kind: str, tmp_path: Path) -> None:
    """Rows are the save's; an id that it does not have starts as the model's config says."""
    saved = MAKERS[kind](device, initializer_type=InitializerType.LINEAR)
    apply(saved)
    train_step(saved, single_ids([1, 2, 3]))
    rst.Saver().save(saved, tmp_path)
    for initializer in (None, InitializerType.LINEAR):
        loaded, fresh = (MAKERS[kind](device, initializer_type=initializer) for _ in range(2))
        apply(loaded)
        rst.Saver().load(loaded, tmp_path)
        assert torch.equal(read(loaded, single_ids([1, 2, 3])), read(saved, single_ids([1, 2, 3])))
        assert torch.equal(read(loaded, single_ids([8, 9])), read(fresh, single_ids([8, 9])))


def test_uniform(device: torch.device) -> None:
    fields = {"initializer_type": InitializerType.UNIFORM, "embedding_dim": 16}
    rows = initial(device, range(2000), **fields, weight_init_min=-0.25, weight_init_max=0.75)
    assert rows.min() >= -0.25
    assert rows.max() < 0.75
    assert rows.unique().numel() > 31_000
    assert abs(float(rows.mean()) - 0.25) < 0.01
    assert abs(float(rows.std()) - 12**-0.5) < 0.01
    default = initial(device, range(2000), **fields)
    assert 0.99 * 40**-0.5 < default.abs().max() <= 40**-0.5


def test_truncated_normal(device: torch.device) -> None:
    rows = initial(
        device,
        range(2000),
        initializer_type=InitializerType.TRUNCATED_NORMAL,
        weight_init_mean=3.0,
        weight_init_stddev=0.5,
        embedding_dim=16,
    )
    assert rows.min() >= 2.0
    assert rows.max() <= 4.0
    assert abs(float(rows.mean()) - 3.0) < 0.02
    assert abs(float(rows.std()) - 0.5 * 0.8796) < 0.01  # of a normal cut at two sigma


@pytest.mark.parametrize(
    ("low", "high", "bounds"),
    [(0.0, 1.0, (0.0, 1.0)), (-0.01, None, (-0.01, 0.1)), (None, -0.05, (-0.1, -0.05)), (0.1, 0.125, (0.1, 0.125))],
)
def test_truncated_normal_keeps_its_bounds(
    device: torch.device, low: float | None, high: float | None, bounds: tuple[float, float]
) -> None:
    fields = {"initializer_type": InitializerType.TRUNCATED_NORMAL, "embedding_dim": 16}
    rows = initial(device, range(2000), weight_init_min=low, weight_init_max=high, **fields)
    normal = torch.randn(4_000_000, generator=torch.Generator().manual_seed(0)) * 0.05
    redrawn = normal[(normal >= bounds[0]) & (normal <= bounds[1])]
    assert bounds[0] <= rows.min() < rows.max() <= torch.tensor(bounds[1])
    assert rows.unique().numel() > 30_000
    for share in (0.05, 0.25, 0.5, 0.75, 0.95):
        assert abs(float(rows.quantile(share)) - float(redrawn[:1_000_000].quantile(share))) < 0.002


def test_bounds_without_a_normal_between() -> None:
    normal = {"initializer_type": InitializerType.TRUNCATED_NORMAL}
    for fields, message in (
        ({"weight_init_min": 2.0, "weight_init_max": 3.0}, "nearer bound is more than 37 stddev"),
        ({"weight_init_min": 0.5}, "min <= max"),
        ({"weight_init_min": 0.5, "weight_init_max": 1.0, "weight_init_stddev": 0.0}, "nearer bound"),
    ):
        with pytest.raises(ValueError, match=message):
            bags_collection(torch.device("cpu"), bag_config(**normal, **fields))


@pytest.mark.parametrize("kind", [InitializerType.UNIFORM, InitializerType.TRUNCATED_NORMAL])
def test_initial_weights_depend_on_seed_table_and_id_alone(device: torch.device, kind: InitializerType) -> None:
    fields = {"initializer_type": kind}
    expected = dict(zip(IDS, initial(device, **fields), strict=True))
    for order, cache in (((6, 0, 3), 3), ((1, 2, 3, 4, 5, 6, 0), 40)):
        collection = bags_collection(device, bag_config(**fields), cache=cache)
        apply(collection, lr=0.0)
        for i in order:
            train_step(collection, single_ids([IDS[i]]))
        for i, row in rows_of(collection).items():
            assert torch.equal(row, expected[i])
    assert not torch.equal(initial(device, seed=1, **fields), torch.stack(list(expected.values())))
    assert not torch.equal(initial(device, name="other", **fields), torch.stack(list(expected.values())))


def towers(device: torch.device, seed: int) -> list[torch.Tensor]:
    """Rows of collections with one table name that are made one after the other, without a seed of their own."""
    fields = {"initializer_type": InitializerType.UNIFORM}
    capacity = HashEmbeddingBagConfig(name="t0", num_embeddings=40, embedding_dim=4, feature_names=["f0"], **fields)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = [
            bags_collection(device, bag_config(**fields), seed=None),
            bags_collection(device, bag_config(**fields), seed=None),
            HashEmbeddingBagCollection([capacity], device=device),
            bags_collection(device, EmbeddingBagConfig(40, 4, name="t0", feature_names=["f0"]), seed=None),
        ]
    ids = single_ids([1, 5, 7])
    return [read(collection, ids) for collection in (*made, *(copy.deepcopy(each) for each in made))]


def test_collections_without_a_seed_start_apart(device: torch.device) -> None:
    """As torch's modules: a copy has the weights of its original, and torch.manual_seed repeats all of them."""
    first, again, other = towers(device, 3), towers(device, 3), towers(device, 4)
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert all(torch.equal(*pair) for pair in zip(first[:4], first[4:], strict=True))
    every = [*first[:4], *other[:4]]
    assert not any(torch.equal(one, two) for one, two in itertools.combinations(every, 2))


def test_a_seed_says_all(device: torch.device) -> None:
    """It draws nothing, and a collection on the meta device has the weights of one that was made on a device."""
    fields = {"initializer_type": InitializerType.UNIFORM}
    before = torch.get_rng_state()
    plain, meta = (bags_collection(where, bag_config(**fields)) for where in (device, torch.device("meta")))
    assert torch.equal(torch.get_rng_state(), before)
    meta.to_empty(device=device)
    assert torch.equal(read(plain, single_ids([1, 5, 7])), read(meta, single_ids([1, 5, 7])))


def fill_by_row(param: torch.Tensor) -> None:
    param.copy_(torch.arange(param.shape[0], dtype=torch.float32)[:, None].expand_as(param))


def test_init_fn_of_index_tables(device: torch.device) -> None:
    config = EmbeddingConfig(num_embeddings=30, embedding_dim=3, name="t0", feature_names=["f0"], init_fn=fill_by_row)
    half = EmbeddingConfig(
        num_embeddings=9, embedding_dim=3, name="t1", init_fn=torch.nn.init.ones_, data_type=DataType.BF16
    )
    collection = sequences_collection(device, config, half, cache=4)
    weight = collection.state_dict()["embeddings.t0.weight"]
    assert torch.equal(weight, torch.arange(30.0)[:, None].expand(30, 3))
    assert torch.equal(collection.state_dict()["embeddings.t1.weight"], torch.ones(9, 3, dtype=torch.bfloat16))
    assert read(collection, jagged({"f0": [[7]], "t1": [[0]]})).tolist() == [7.0] * 3 + [1.0] * 3


def test_init_fn_that_fails_is_called_again(device: torch.device) -> None:
    """It leaves no table whose rows were not drawn."""
    errors = [ValueError("not now")]

    def fill(param: torch.Tensor) -> None:
        if errors:
            raise errors.pop()
        param.fill_(5.0)

    config = EmbeddingConfig(num_embeddings=9, embedding_dim=3, name="t0", feature_names=["f0"], init_fn=fill)
    collection = sequences_collection(device, config, cache=4)
    with pytest.raises(ValueError, match="not now"):
        read(collection, jagged({"f0": [[7]]}))
    assert read(collection, jagged({"f0": [[7]]})).tolist() == [5.0] * 3


def test_init_fn_of_hash_tables(device: torch.device) -> None:
    """It fills blocks of new rows, once per row; a row keeps its weight whatever the cache does."""
    calls: list[int] = []

    def fill(block: torch.Tensor) -> None:
        calls.append(len(block))
        block.fill_(float(len(calls)))

    linear = bag_config("t1", ["f1"], initializer_type=InitializerType.LINEAR)
    collection = bags_collection(device, bag_config(init_fn=fill), linear, cache=4)
    apply(collection, lr=0.0)
    for start in (0, 3, 1, 5):
        bags = [list(range(start, start + 3))]
        train_step(collection, jagged({"f0": bags, "f1": bags}))
    assert calls == [3, 3, 2]
    rows = rows_of(collection)
    assert [float(row[0]) for row in rows.values()] == [1, 1, 1, 2, 2, 2, 3, 3]
    assert list(rows) == list(range(8))
    assert all(torch.equal(row, row[:1].expand(4)) for row in rows.values())
    edge = 40**-0.5
    assert all(abs(float(row[0]) + edge) < 1e-6 for row in rows_of(collection, "t1").values())
    assert read(collection, jagged({"f0": [[0], [99]], "f1": [[], []]}))[:, 0].tolist() == [1.0, 4.0]
    assert len(rows_of(collection)) == 8


def test_torchrecs_default_init_fn_means_uniform(device: torch.device) -> None:
    config = EmbeddingBagConfig(num_embeddings=1000, embedding_dim=8, name="t0", weight_init_max=0.5, weight_init_min=0)
    weights = [bags_collection(device, config, seed=s).state_dict()["embedding_bags.t0.weight"] for s in (0, 0, 1)]
    assert weights[0].min() >= 0
    assert 0.49 < weights[0].max() <= 0.5
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
