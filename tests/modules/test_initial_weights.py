"""Initial rows: defaults, the seed, and `init_fn`. tests/engine/test_initializers.cpp tests the distributions."""

from __future__ import annotations

import copy
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import jagged, single_ids
from collection_factory import (
    apply,
    bag_config,
    bags_collection,
    capacity_collection,
    capacity_config,
    index_bag_config,
    index_sequence_config,
    sequence_config,
    sequences_collection,
)
from training import read, rows_of, train, train_step

import rec_sdk_torch as rst
from rec_sdk_torch import HashEmbeddingBagCollection, InitializerType
from rec_sdk_torch.modules.defaults import config_defaults

IDS = (-(2**63), -1, 0, 1, 5, 1000, 2**63 - 1)


def initial(device: torch.device, ids: Any = IDS, **fields: Any) -> torch.Tensor:
    options = {name: fields.pop(name) for name in ("cache", "seed") if name in fields}
    return read(bags_collection(device, bag_config(**fields), **options), single_ids(list(ids)))


def test_linear_initializer(device: torch.device) -> None:
    edge = 40**-0.5
    for fields, expected in (
        ({"embedding_dim": 5, "weight_init_min": -1.0, "weight_init_max": 3.0}, [-1.0, 0.0, 1.0, 2.0, 3.0]),
        ({"embedding_dim": 3}, [-edge, 0.0, edge]),
        ({"embedding_dim": 1, "weight_init_min": 0.125}, [0.125]),
    ):
        rows = initial(device, initializer_type=InitializerType.LINEAR, **fields)
        torch.testing.assert_close(rows, torch.tensor(expected).expand(len(IDS), len(expected)))


def hash_collection(device: torch.device, **fields: Any) -> HashEmbeddingBagCollection:
    """Builds a collection without a host store, whose seed is drawn from torch's generator."""
    torch.manual_seed(0)
    return capacity_collection(device, capacity_config(**fields))


DEFAULT = {"initializer_type": None}
MAKERS = {
    "pooled": lambda device, **fields: bags_collection(device, bag_config(**fields)),
    "sequence": lambda device, **fields: sequences_collection(device, sequence_config(**fields)),
    "hash": hash_collection,
}


@pytest.mark.parametrize("kind", list(MAKERS))
def test_the_default_has_torchrecs_bounds(device: torch.device, kind: str) -> None:
    """Every id has a row of its own, drawn uniformly between plus and minus sqrt(1 / num_embeddings)."""
    default, uniform = (read(MAKERS[kind](device, **fields), single_ids(range(30))) for fields in (DEFAULT, {}))
    assert torch.equal(default, uniform)
    assert default.unique().numel() == 120
    assert 0.9 * 40**-0.5 < default.abs().max() <= 40**-0.5


@pytest.mark.parametrize("kind", list(MAKERS))
def test_the_default_is_announced_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config without an initializer and without `init_fn` warns once; the warning says how to silence it."""
    monkeypatch.setattr(config_defaults, "warns_changed_default", True)
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
    assert Path(caught[0].filename).name in (
        "collection_factory.py",
        "test_initial_weights.py",
    )  # the warning points to this file, not to one of the package


@pytest.mark.parametrize("kind", ["pooled", "sequence"])
def test_a_load_keeps_the_rows_of_another_initializer(device: torch.device, kind: str, tmp_path: Path) -> None:
    """Loaded ids have the save's rows; other ids are initialized by the model's own config."""
    saved = apply(MAKERS[kind](device, initializer_type=InitializerType.LINEAR))
    train_step(saved, single_ids([1, 2, 3]))
    rst.Saver().save(saved, tmp_path)
    for initializer in (None, InitializerType.LINEAR):
        loaded, fresh = (MAKERS[kind](device, initializer_type=initializer) for _ in range(2))
        apply(loaded)
        rst.Saver().load(loaded, tmp_path)
        assert torch.equal(read(loaded, single_ids([1, 2, 3])), read(saved, single_ids([1, 2, 3])))
        assert torch.equal(read(loaded, single_ids([8, 9])), read(fresh, single_ids([8, 9])))


NORMAL = {"initializer_type": InitializerType.TRUNCATED_NORMAL, "embedding_dim": 16}


def test_truncated_normal_with_impossible_bounds_is_refused() -> None:
    for fields, message in (
        ({"weight_init_min": 2.0, "weight_init_max": 3.0}, "nearer bound is more than 37 stddev"),
        ({"weight_init_min": 0.5}, "min <= max"),
        ({"weight_init_min": 0.5, "weight_init_max": 1.0, "weight_init_stddev": 0.0}, "nearer bound"),
    ):
        with pytest.raises(ValueError, match=message):
            bags_collection(torch.device("cpu"), bag_config(**NORMAL, **fields))


@pytest.mark.parametrize("kind", [InitializerType.UNIFORM, InitializerType.TRUNCATED_NORMAL])
def test_initial_weights_depend_on_seed_table_and_id_alone(device: torch.device, kind: InitializerType) -> None:
    fields = {"initializer_type": kind}
    rows = initial(device, **fields)
    expected = dict(zip(IDS, rows, strict=True))
    for order, cache in (((6, 0, 3), 3), ((1, 2, 3, 4, 5, 6, 0), 40)):
        collection = apply(bags_collection(device, bag_config(**fields), cache=cache), lr=0.0)
        train(collection, [single_ids([IDS[i]]) for i in order])
        for i, row in rows_of(collection).items():
            assert torch.equal(row, expected[i])
    assert not torch.equal(initial(device, seed=1, **fields), rows)
    assert not torch.equal(initial(device, name="other", **fields), rows)


def towers(device: torch.device, seed: int) -> list[torch.Tensor]:
    """Builds several collections without a seed, all with the same table name; returns their rows."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = [
            bags_collection(device, seed=None),
            bags_collection(device, seed=None),
            capacity_collection(device),
            bags_collection(device, index_bag_config(), seed=None),
        ]
    ids = single_ids([1, 5, 7])
    return [read(collection, ids) for collection in (*made, *(copy.deepcopy(each) for each in made))]


def test_collections_without_a_seed_differ(device: torch.device) -> None:
    """As with torch's modules, a copy has its original's weights, and torch.manual_seed makes all weights
    reproducible.
    """
    first, again, other = towers(device, 3), towers(device, 3), towers(device, 4)
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert all(torch.equal(*pair) for pair in zip(first[:4], first[4:], strict=True))
    every = [*first[:4], *other[:4]]
    assert not any(torch.equal(one, two) for one, two in itertools.combinations(every, 2))


def test_an_explicit_seed_determines_the_weights(device: torch.device) -> None:
    """With an explicit seed, torch's generator is not used, and a collection moved from the meta device has
    equal weights.
    """
    before = torch.get_rng_state()
    plain, meta = (bags_collection(where) for where in (device, torch.device("meta")))
    assert torch.equal(torch.get_rng_state(), before)
    meta.to_empty(device=device)
    assert torch.equal(read(plain, single_ids([1, 5, 7])), read(meta, single_ids([1, 5, 7])))


def test_init_fn_that_fails_is_called_again(device: torch.device) -> None:
    """After the error, no half-initialized table remains."""
    errors = [ValueError("not now")]

    def fill(param: torch.Tensor) -> None:
        if errors:
            raise errors.pop()
        param.fill_(5.0)

    collection = sequences_collection(device, index_sequence_config(embedding_dim=3, init_fn=fill), cache=4)
    with pytest.raises(ValueError, match="not now"):
        read(collection, jagged({"f0": [[7]]}))
    assert read(collection, jagged({"f0": [[7]]})).tolist() == [5.0] * 3


def test_torchrecs_default_init_fn_means_uniform(device: torch.device) -> None:
    config = index_bag_config(num_embeddings=1000, embedding_dim=8, weight_init_max=0.5, weight_init_min=0)
    weights = [bags_collection(device, config, seed=s).state_dict()["embedding_bags.t0.weight"] for s in (0, 0, 1)]
    assert weights[0].min() >= 0
    assert 0.49 < weights[0].max() <= 0.5
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
