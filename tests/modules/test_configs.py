"""Invalid table configs and collection arguments are refused at construction, with a helpful message."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from batches import jagged, numbered, single_ids
from collection_factory import (
    EACH_KIND,
    Kind,
    apply,
    bag_config,
    bags_collection,
    capacity_collection,
    capacity_config,
    index_bag_config,
)
from torchrec.modules.embedding_configs import DataType
from training import assert_trains, read, train_step

import rec_sdk_torch as rst
from rec_sdk_torch.tbe import TableBatchedEmbedding, TableConfig

SHOWCLICK = rst.AdmitAndEvictPolicyType.POLICY_SHOWCLICK
SHOWCLICK_ADMITS, SHOWCLICK_EVICTS = (
    rst.AdmitAndEvictConfig(showclick_params=params, policy_type=SHOWCLICK)
    for params in (rst.ShowClickParams(admit_threshold=0.5), rst.ShowClickParams(evict_percentage=0.1))
)

FIELDS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"name": ""}, ValueError, "name ''"),
    ({"name": "a.b"}, ValueError, "name 'a.b'"),
    ({"name": "ä"}, ValueError, "name 'ä'"),
    ({"name": "t0\n"}, ValueError, "name"),
    ({"name": "x" * 101}, ValueError, "101 characters, at most 100"),
    ({"features": ["a b"]}, ValueError, "'t0'.*'a b'"),
    ({"features": [""]}, ValueError, "'t0'.*''"),
    ({"features": ["f@t"]}, ValueError, "'t0'.*'f@t'"),
    ({"features": [3]}, ValueError, "'t0'.*3"),
    ({"features": ["f0", "f0"]}, ValueError, "'t0'.*twice"),
    ({"embedding_dim": 0}, ValueError, "'t0'.*embedding_dim is 0.*4096"),
    ({"embedding_dim": 4097}, ValueError, "'t0'.*embedding_dim is 4097.*4096"),
    ({"embedding_dim": 8.0}, ValueError, "'t0'.*embedding_dim is 8.0"),
    ({"num_embeddings": 0}, ValueError, "'t0'.*num_embeddings is 0"),
    ({"num_embeddings": -3}, ValueError, "'t0'.*num_embeddings is -3"),
    ({"num_embeddings": "9"}, ValueError, "'t0'.*num_embeddings is '9'"),
    ({"num_embeddings": True}, ValueError, "'t0'.*num_embeddings is True"),
    ({"num_embeddings": np.float64(9)}, ValueError, "'t0'.*num_embeddings is .*9.0"),
    ({"embedding_dim": np.bool_(True)}, ValueError, "'t0'.*embedding_dim is .*True"),
    ({"data_type": DataType.INT8}, ValueError, "'t0'.*int8.*float32"),
    ({"data_type": "FP32x"}, ValueError, "'t0'.*'FP32x'"),
    ({"data_type": torch.float32}, ValueError, "'t0'.*float32"),
    ({"initializer_type": "uniform"}, TypeError, "'t0'.*initializer_type is 'uniform'"),
    ({"weight_init_min": 2.0, "weight_init_max": 1.0}, ValueError, "'t0'.*min 2.0 and max 1.0"),
    ({"weight_init_min": float("nan")}, ValueError, "'t0'.*min nan"),
    (
        {"initializer_type": rst.InitializerType.TRUNCATED_NORMAL, "weight_init_stddev": -1.0},
        ValueError,
        "'t0'.*stddev -1.0",
    ),
    ({"num_embeddings_post_pruning": 20}, ValueError, "'t0'.*num_embeddings_post_pruning is 20.*leave it None"),
    ({"need_pos": True}, ValueError, "'t0'.*need_pos is True.*no effect.*leave it False"),
    ({"input_dim": 8}, ValueError, "'t0'.*input_dim is 8.*leave it None"),
    ({"total_num_buckets": 2}, ValueError, "'t0'.*total_num_buckets is 2.*leave it None"),
    ({"use_virtual_table": True}, ValueError, "'t0'.*use_virtual_table is True.*leave it False"),
    ({"enable_embedding_update": True}, ValueError, "'t0'.*enable_embedding_update is True.*leave it False"),
    ({"admit_and_evict_config": {"admit_threshold": 2}}, TypeError, "'t0'.*admit_and_evict_config is {'admit"),
]


@EACH_KIND
@pytest.mark.parametrize(("fields", "error", "message"), FIELDS, ids=[str(next(iter(f[0].items()))) for f in FIELDS])
def test_invalid_table_fields_are_refused(
    device: torch.device, kind: Kind, fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        kind.collection(device, kind.config(**fields))


def test_fields_of_torchrec_alone(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"'t0'.*need_pos is True"):
        bags_collection(device, index_bag_config(need_pos=True))


ADMISSION_OFF = {
    "the defaults": rst.AdmitAndEvictConfig(),
    "a value without a threshold": rst.AdmitAndEvictConfig(admit_threshold=-1, not_admitted_default_value=0.99),
    "an interval without a threshold": rst.AdmitAndEvictConfig(evict_step_interval=5),
    "parameters of the other policy": rst.AdmitAndEvictConfig(
        showclick_params=rst.ShowClickParams(1, 1, 0.5, 0.1, 0.9)
    ),
    "thresholds of the other policy": rst.AdmitAndEvictConfig(3, 0.5, 60, 10, policy_type=SHOWCLICK),
    "no policy": rst.AdmitAndEvictConfig(
        3, 0.5, 60, 10, rst.ShowClickParams(1, 1, 0.5, 0.1), policy_type=rst.AdmitAndEvictPolicyType.NONE
    ),
    "None, as Rec SDK's types allow": rst.AdmitAndEvictConfig(None, None, None, None),
    "NumPy's numbers": rst.AdmitAndEvictConfig(np.int64(-1), np.float32(0.5), np.int32(0)),
    "no config": None,
}


@EACH_KIND
@pytest.mark.parametrize("admission", ADMISSION_OFF.values(), ids=ADMISSION_OFF)
def test_admission_that_is_off(device: torch.device, kind: Kind, admission: Any) -> None:
    assert_trains(apply(kind.collection(device, kind.config(admit_and_evict_config=admission))))
    if admission is not None:
        assert not admission.is_feature_admit_enabled()
        assert not admission.is_feature_evict_enabled()
        assert not admission.is_feature_filter_enabled()


def test_enabled_admission() -> None:
    counted, clicked = {"admit_threshold": 0}, {"policy_type": SHOWCLICK}
    for config in (rst.AdmitAndEvictConfig(**counted), SHOWCLICK_ADMITS):
        assert (config.is_feature_admit_enabled(), config.is_feature_evict_enabled()) == (True, False)
    for config in (rst.AdmitAndEvictConfig(evict_threshold=1), SHOWCLICK_EVICTS):
        assert (config.is_feature_admit_enabled(), config.is_feature_evict_enabled()) == (False, True)
        assert config.is_feature_filter_enabled()
    assert not rst.AdmitAndEvictConfig(**counted, **clicked).is_feature_admit_enabled()


def test_policies_have_rec_sdks_values() -> None:
    policies = rst.AdmitAndEvictPolicyType
    assert [policies(value) for value in (0, 1, 2)] == [policies.NONE, policies.POLICY_COUNT, policies.POLICY_SHOWCLICK]
    assert [rst.AdmitAndEvictConfig(policy_type=value).policy_type for value in (0, 1, 2)] == list(policies)


ADMISSION: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"admit_threshold": "3"}, TypeError, "admit_threshold is '3', expected an int"),
    ({"admit_threshold": 2.0}, TypeError, "admit_threshold is 2.0"),
    ({"admit_threshold": True}, TypeError, "admit_threshold is True"),
    ({"admit_threshold": -2}, ValueError, "admit_threshold is -2, must be at least -1"),
    ({"admit_threshold": 10**400}, ValueError, "admit_threshold is 10+, .*below 2.63"),
    ({"not_admitted_default_value": -(10**400)}, ValueError, ".*_value is -10+, must be"),
    ({"admit_probability": 10**400}, ValueError, "admit_probability is 10+, must be finite"),
    ({"not_admitted_default_value": "0"}, TypeError, "not_admitted_default_value is '0'"),
    ({"not_admitted_default_value": float("nan")}, ValueError, "not_admitted_default_value"),
    ({"evict_threshold": [1]}, TypeError, r"evict_threshold is \[1\]"),
    ({"evict_threshold": -1}, ValueError, "evict_threshold is -1, must be at least 0"),
    ({"evict_step_interval": 0.5}, TypeError, "evict_step_interval is 0.5"),
    ({"evict_idle_steps": -1}, ValueError, "evict_idle_steps is -1"),
    ({"max_rows": 1.5}, TypeError, "max_rows is 1.5"),
    ({"max_bytes": -1}, ValueError, "max_bytes is -1"),
    ({"evict_step_interval": -1}, ValueError, "evict_step_interval is -1"),
    ({"showclick_params": {}}, TypeError, "showclick_params is {}, expected ShowClickParams"),
    ({"policy_type": "count"}, TypeError, "policy_type is 'count'.*AdmitAndEvictPolicyType"),
]
SHOWCLICK_PARAMS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"alpha": 10**400}, ValueError, "alpha is 10+, must be finite"),
    ({"alpha": "1"}, TypeError, "alpha is '1', expected a number"),
    ({"beta": float("inf")}, ValueError, "beta is inf"),
    ({"admit_threshold": -1}, ValueError, "admit_threshold is -1"),
    ({"evict_percentage": 1.5}, ValueError, r"evict_percentage is 1.5.*\[0, 1\]"),
    ({"score_decay": True}, TypeError, "score_decay is True"),
]
WRONG = [(rst.AdmitAndEvictConfig, *row) for row in ADMISSION] + [
    (rst.ShowClickParams, *row) for row in SHOWCLICK_PARAMS
]


@pytest.mark.parametrize("bound", ["evict_idle_steps", "max_rows", "max_bytes"])
def test_policy_none_with_a_bound_is_refused(bound: str) -> None:
    with pytest.raises(ValueError, match=f"policy_type is NONE.*'{bound}': 5"):
        rst.AdmitAndEvictConfig(policy_type=rst.AdmitAndEvictPolicyType.NONE, **{bound: 5})
    with pytest.raises(ValueError, match="3 is not a valid AdmitAndEvictPolicyType"):
        rst.AdmitAndEvictConfig(policy_type=3)


@pytest.mark.parametrize(("config", "fields", "error", "message"), WRONG, ids=lambda part: str(part)[:60])
def test_invalid_admission_is_refused(
    config: type, fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"{config.__name__}: {message}"):
        config(**fields)


@EACH_KIND
@pytest.mark.parametrize("number", [np.int32, np.int64, np.uint8, torch.tensor])
def test_integers_of_other_libraries(device: torch.device, kind: Kind, number: Any) -> None:
    sizes = {"batch_size": number(3), "multi_hot_sizes": [number(2)], "world_size": number(1), "seed": number(7)}
    config = kind.config(num_embeddings=number(40), embedding_dim=number(4))
    collection, expected = kind.collection(device, config, **sizes), kind.collection(device, seed=7)
    assert torch.equal(read(collection, numbered(3)), read(expected, numbered(3)))
    assert repr(collection.embedding) == repr(expected.embedding)
    assert_trains(apply(collection, rst.AccumulateSGD, use_accumulate=True, accumulate_step=number(1)))


@EACH_KIND
@pytest.mark.parametrize("names", [["user-id"], ["user.id", "user:clicks"], ["f/0"], ["größe"]])
def test_feature_names_as_torchrec_takes_them(device: torch.device, kind: Kind, names: list[str]) -> None:
    collection = apply(kind.collection(device, kind.config(features=names)))
    assert list(collection(jagged({name: [[1], [2, 3]] for name in names})).keys()) == names


def test_a_config_with_capacity_is_refused_without_it(device: torch.device) -> None:
    config = capacity_config("t7", num_embeddings=6)
    with pytest.raises(TypeError, match=r"'t7'.*capacity.*EmbCacheEmbeddingBagCollection.*HashEmbeddingBagCollection"):
        bags_collection(device, bag_config(), config)
    assert_trains(apply(capacity_collection(device, config)))


def test_an_optimizer_class_is_refused(device: torch.device) -> None:
    tables = [TableConfig("t0", 9, 4)]
    for given in (torch.optim.SGD, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), {"lr": 0.1}, "sgd"):
        with pytest.raises(TypeError, match=r"expected a TableOptimizer: TableOptimizer\.create\("):
            TableBatchedEmbedding(tables, optimizer=given, device=device)  # type: ignore[arg-type]


@pytest.mark.parametrize("cache", [1, np.int64(1), {"t0": 1}])
def test_a_cache_of_one_row_warns(device: torch.device, cache: Any) -> None:
    """cache=1 is one row, unlike cache=1.0, the whole table: a warning explains this, and the cache still works."""
    with pytest.warns(UserWarning, match=r"'t0'.*int 1 is one of its 40 rows; 1\.0 is all rows") as caught:
        collection = bags_collection(device, cache=cache)
    assert len(caught) == 1
    apply(collection)
    train_step(collection, numbered(1))
    assert collection.cache_sizes == {"t0": 1}


@pytest.mark.parametrize(("cache", "rows"), [(1.0, 40), (2, 40), ({"t1": 1}, 1), (1, 1)])
def test_other_caches_do_not_warn(device: torch.device, cache: Any, rows: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bags_collection(device, bag_config(num_embeddings=rows), bag_config("t1", num_embeddings=1), cache=cache)


def test_names_at_the_limit(device: torch.device) -> None:
    collection = apply(bags_collection(device, bag_config("x" * 100, num_embeddings=1, embedding_dim=4096)))
    assert train_step(collection, single_ids([5])).shape == (1, 4096)
