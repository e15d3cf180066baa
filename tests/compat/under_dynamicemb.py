"""Tests that test_dynamicemb.py runs in a separate process started with `python -m rec_sdk_torch.compat`."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import dynamicemb
import numpy as np
import pytest
import torch
from dynamicemb import DynamicEmbInitializerArgs as Args
from dynamicemb import DynamicEmbInitializerMode as Mode
from dynamicemb import DynamicEmbScoreStrategy as Strategy
from dynamicemb import DynamicEmbTableOptions as Options
from dynamicemb import FrequencyAdmissionStrategy
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2 as Tables
from dynamicemb.dynamicemb_config import complete_initializer_args, get_optimizer_state_dim
from dynamicemb.optimizer import EmbOptimType
from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder, DynamicEmbeddingCollectionSharder
from torchrec import EmbeddingConfig

from rec_sdk_torch._engine import owner_ranks

DEVICE = torch.device("cuda:0")
"""The NPU or the CPU: compat maps the name "cuda" to them if there is no CUDA."""

NAMES = {
    "": (
        "AdmissionStrategy BUCKET_ALIGNMENT DEMB_TABLE_ALIGN_SIZE MAX_BUCKET_CAPACITY align_to_table_size "
        "get_table_value_bytes get_sharded_table_capacity FrequencyAdmissionStrategy Counter KVCounter "
        "DynamicEmbCheckMode DynamicEmbInitializerArgs DynamicEmbInitializerMode DynamicEmbTableOptions "
        "DynamicEmbPoolingMode DynamicEmbEvictStrategy DynamicEmbScoreStrategy ScoreStrategy BATCH_SIZE_PER_DUMP "
        "data_type_to_dyn_emb data_type_to_dtype dyn_emb_to_torch torch_to_dyn_emb string_to_evict_strategy "
        "DynamicEmbDump DynamicEmbLoad EmbOptimType"
    ),
    ".planner": (
        "DynamicEmbeddingEnumerator DynamicEmbeddingShardingPlanner DynamicEmbParameterConstraints "
        "DynamicEmbParameterSharding"
    ),
    ".shard": (
        "ShardedDynamicEmbeddingCollection DynamicEmbeddingCollectionSharder ShardedDynamicEmbeddingBagCollection "
        "DynamicEmbeddingBagCollectionSharder"
    ),
    ".types": "MAX_BUCKET_CAPACITY AdmissionStrategy DynamicEmbInitializerArgs Counter KEY_TYPE SCORE_TYPE",
    ".dynamicemb_config": "DynamicEmbTableOptions complete_initializer_args get_sharded_table_capacity",
    ".embedding_admission": "FrequencyAdmissionStrategy KVCounter",
    ".incremental_dump": "get_score set_score incremental_dump",
    ".dump_load": "DynamicEmbDump DynamicEmbLoad find_sharded_modules get_dynamic_emb_module",
    ".optimizer": "EmbOptimType get_optimizer_state_dim",
    ".utils": "DTYPE_NUM_BYTES torch_to_dyn_emb",
}
PLANNER = (
    "self eb_configs topology=None batch_size=None enumerator=None storage_reservation=None proposer=None "
    "partitioner=None performance_model=None stats=None constraints=None debug=True"
)
CALLS = {
    ".planner:DynamicEmbeddingShardingPlanner.__init__": PLANNER,
    ".planner:DynamicEmbeddingEnumerator.__init__": "self topology batch_size=512 constraints=None estimator=None",
    ".shard:DynamicEmbeddingCollectionSharder.__init__": (
        "self fused_params=None qcomm_codecs_registry=None use_index_dedup=False"
    ),
    ".shard:DynamicEmbeddingBagCollectionSharder.__init__": "self fused_params=None qcomm_codecs_registry=None",
    ":DynamicEmbDump": "path model table_names=None optim=False counter=False pg=None allow_overwrite=False",
    ":DynamicEmbLoad": "path model table_names=None optim=False counter=False pg=None",
    ".incremental_dump:incremental_dump": "model score_threshold pg=None",
    ".incremental_dump:get_score": "model",
    ".incremental_dump:set_score": "model table_score",
    ":KVCounter": "capacity bucket_capacity=1024 key_type=torch.int64",
    ":FrequencyAdmissionStrategy": "threshold initializer_args=None",
    ":get_sharded_table_capacity": "embedding_config world_size bucket_capacity",
    ":get_table_value_bytes": "embedding_config optimizer_type world_size bucket_capacity=128",
    ":align_to_table_size": "n alignment=16",
    ":DynamicEmbInitializerArgs": (
        "mode=<DynamicEmbInitializerMode.UNIFORM:_'uniform'> mean=0.0 std_dev=1.0 lower=None upper=None value=0.0"
    ),
}
"""The parameters of dynamicemb's classes and functions, with their defaults."""


@pytest.mark.parametrize("package", ["dynamicemb", "dynamic_emb"])
@pytest.mark.parametrize("module", NAMES)
def test_names(package: str, module: str) -> None:
    found, own = importlib.import_module(package + module), importlib.import_module("rec_sdk_torch.compat.dynamicemb")
    for name in NAMES[module].split():
        assert getattr(found, name) is not None
        assert name in dir(found)
        assert name not in own.__all__ or getattr(found, name) is getattr(own, name)


@pytest.mark.parametrize("call", CALLS)
def test_arguments(call: str) -> None:
    module, _, path = call.partition(":")
    found: Any = importlib.import_module(f"dynamicemb{module}")
    for name in path.split("."):
        found = getattr(found, name)
    given = [
        f"{p.name}={p.default!r}" if p.default is not p.empty else p.name
        for p in inspect.signature(found).parameters.values()
    ]
    assert [each.replace(" ", "_") for each in given] == CALLS[call].split()


def test_defaults_and_order_of_table_options() -> None:
    expected = {
        "embedding_dtype": None,
        "dim": None,
        "max_capacity": None,
        "evict_strategy": dynamicemb.DynamicEmbEvictStrategy.LRU,
        "local_hbm_for_values": 0,
        "device_id": None,
        "training": True,
        "initializer_args": Args(),
        "eval_initializer_args": Args(Mode.CONSTANT, value=0.0),
        "caching": False,
        "init_capacity": None,
        "max_load_factor": 0.5,
        "score_strategy": Strategy.TIMESTAMP,
        "bucket_capacity": 128,
        "safe_check_mode": dynamicemb.DynamicEmbCheckMode.IGNORE,
        "global_hbm_for_values": 0,
        "external_storage": None,
        "index_type": None,
        "dist_type": "roundrobin",
        "admit_strategy": None,
        "admission_counter": None,
    }
    options = Options()
    assert list(vars(options)) == list(expected)
    assert vars(options) == expected
    assert options == Options(dim=3)
    assert options != Options(caching=True)


def test_sizes() -> None:
    config = EmbeddingConfig(name="t", num_embeddings=1000, embedding_dim=8, feature_names=["t"])
    assert dynamicemb.get_sharded_table_capacity(config, 3, 128) == 384
    assert dynamicemb.get_sharded_table_capacity(config, 3, dynamicemb.MAX_BUCKET_CAPACITY) == 336
    assert dynamicemb.get_table_value_bytes(config, EmbOptimType.ADAM, 3, 128) == 3 * 384 * 24 * 4
    kinds = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    assert [get_optimizer_state_dim(kind, 8, torch.float16) for kind in kinds] == [0, 8]
    with pytest.raises(ValueError, match="bucket_capacity is 100"):
        dynamicemb.get_sharded_table_capacity(config, 3, 100)
    assert complete_initializer_args(Args(lower=0.5), embedding_config=config).upper == (1 / 1000) ** 0.5
    assert complete_initializer_args(Args()) == Args(lower=0.0, upper=1.0)


def tables(rows: int = 16, name: str = "t", optimizer: EmbOptimType = EmbOptimType.ADAM, **options: Any) -> Tables:
    torch.manual_seed(0)
    given = {"initializer_args": Args(lower=-1.0, upper=1.0), **options}
    own = Options(dim=4, max_capacity=rows, embedding_dtype=torch.float32, **given)
    none = dynamicemb.DynamicEmbPoolingMode.NONE
    return Tables([own], [name], pooling_mode=none, device=DEVICE, optimizer=optimizer, learning_rate=0.1)


def train(module: Tables, *ids: int) -> None:
    module(torch.tensor(ids), torch.tensor([0, len(ids)])).sum().backward()


def ids_of(module: Tables) -> set[int]:
    return set(module.export_keys_values("t", torch.device("cpu"))[0].tolist())


@pytest.mark.parametrize("admitted", [False, True])
@pytest.mark.parametrize("strategy", [Strategy.STEP, Strategy.TIMESTAMP, Strategy.LFU])
def test_rows_with_the_lowest_scores_are_evicted(strategy: Strategy, admitted: bool) -> None:
    admit = FrequencyAdmissionStrategy(2, Args(Mode.CONSTANT)) if admitted else None
    module = tables(score_strategy=strategy, admit_strategy=admit)
    seen = 2 if admitted else 1
    for step in range(8):
        train(module, *[2 * step, 2 * step + 1] * seen)
    train(module, *[0] * 9)  # id 0 is used most often
    train(module, *[1, 1])
    train(module, *[100, 100])
    assert len(ids_of(module)) == 14  # 7/8 of the capacity of 16 rows
    if strategy is Strategy.LFU:
        assert {0, 1} <= ids_of(module)
    else:  # the rows that were idle for longest are evicted
        assert ids_of(module) == {0, 1, *range(5, 16), 100}


def test_rows_with_the_lowest_customized_score_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAMICEMB_CSTM_SCORE_CHECK", "0")
    module = tables(score_strategy=Strategy.CUSTOMIZED)
    for score, ids in ((50, range(4)), (10, range(4, 8)), (30, range(8, 16))):
        module.set_score({"t": score})
        train(module, *ids)
    module.set_score({"t": 40})
    train(module, 100)
    # of the rows with the lowest score, the smaller ids are evicted
    assert ids_of(module) == {*range(4), 7, *range(8, 16), 100}


def test_no_eviction_keeps_all_rows() -> None:
    module = tables(score_strategy=Strategy.NO_EVICTION)
    for begin in range(0, 96, 12):
        train(module, *range(begin, begin + 12))
    assert len(ids_of(module)) == 96
    assert module.get_score() == {"t": 0}


def test_an_incremental_dump_has_the_rows_above_a_score() -> None:
    for strategy, first in ((Strategy.STEP, 1), (Strategy.CUSTOMIZED, 0), (Strategy.TIMESTAMP, None)):
        module = tables(rows=100, score_strategy=strategy)
        assert first is None or module.get_score() == {"t": first}
        if strategy is Strategy.CUSTOMIZED:
            module.set_score({"t": 7})
        train(module, 1, 2, 3)
        if strategy is Strategy.CUSTOMIZED:
            module.set_score({"t": 9})
        threshold = module.get_score()
        train(module, 3, 4)
        rows, scores = module.incremental_dump(threshold)
        ids, weights = rows["t"]
        assert set(ids.tolist()) == {3, 4}
        assert torch.equal(weights, module._scores["t"].view.read(ids, ["weight"]).parts["weight"])
        assert len(module.incremental_dump({"t": 1})[0]["t"][0]) == 4
        if strategy is not Strategy.CUSTOMIZED:
            assert len(module.incremental_dump(scores)[0]["t"][0]) == 0
    lfu = tables(rows=100, score_strategy=(Strategy.LFU, Strategy.TIMESTAMP))
    train(lfu, 1, 1, 2)
    threshold = lfu.get_score()
    train(lfu, 2)
    assert lfu.incremental_dump(threshold)[0]["t"][0].tolist() == [2]


def test_scores_can_be_set_where_they_are_customized() -> None:
    module = tables(score_strategy=Strategy.CUSTOMIZED)
    module.set_score({"t": 5})
    with pytest.warns(UserWarning, match="score 3 is less than 5"):
        module.set_score({"t": 3})
    for target, wrong in [(module, each) for each in (0, -1, 1.5, True, 2**63)] + [(tables(), 1)]:
        with pytest.raises(ValueError, match=r"expected an int|set_score needs CUSTOMIZED"):
            target.set_score({"t": wrong})


def test_ids_without_a_row() -> None:
    zeros = Args(Mode.CONSTANT, value=0.25)
    module = tables(admit_strategy=FrequencyAdmissionStrategy(3, zeros), eval_initializer_args=zeros)
    out = module(torch.tensor([5, 5, 6]), torch.tensor([0, 3]))
    assert (out == 0.25).all()
    out.sum().backward()
    train(module, 5)
    assert ids_of(module) == {5}
    module.eval()
    assert (module(torch.tensor([6]), torch.tensor([0, 1])) == 0.25).all()
    plain = tables(eval_initializer_args=zeros).eval()
    assert (plain(torch.tensor([6]), torch.tensor([0, 1])) == 0.25).all()


@pytest.mark.parametrize(
    ("args", "low", "high"),
    [
        (Args(Mode.UNIFORM, lower=-0.5, upper=-0.25), -0.5, -0.25),
        (Args(Mode.CONSTANT, value=0.75), 0.75, 0.75),
        (Args(Mode.NORMAL, mean=50.0, std_dev=0.1), 49.0, 51.0),
        (Args(Mode.TRUNCATED_NORMAL, mean=1.0, std_dev=3.0, lower=0.5, upper=1.5), 0.5, 1.5),
    ],
)
def test_initial_weights(args: Args, low: float, high: float) -> None:
    out = tables(rows=512, initializer_args=args)(torch.arange(400), torch.tensor([0, 400])).detach()
    assert low <= out.min()
    assert out.max() <= high
    assert args.mode is Mode.CONSTANT or len(out.unique()) > 100


def test_pooling_and_features() -> None:
    own = [Options(dim=dim, max_capacity=64, initializer_args=Args(Mode.CONSTANT, value=dim)) for dim in (2, 4)]
    module = Tables(own, ["a", "b"], [0, 0, 1], pooling_mode=dynamicemb.DynamicEmbPoolingMode.MEAN, device=DEVICE)
    out = module(torch.tensor([1, 2, 3, 4]), torch.tensor([0, 2, 3, 4]))
    assert out.shape == (1, 8)
    out.sum().backward()
    ids, weights = module.export_keys_values("a", torch.device("cpu"))
    assert ids.tolist() == [1, 2, 3]
    torch.testing.assert_close(weights[:, 0], torch.tensor([2 - 0.005, 2 - 0.005, 2 - 0.01]))
    assert module.table_names == ["a", "b"]


@pytest.mark.parametrize("optimizer", ["ADAM", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD", "EXACT_SGD"])
@pytest.mark.parametrize("strategy", [*Strategy, (Strategy.TIMESTAMP, Strategy.LFU)])
def test_a_dump_is_loaded(optimizer: str, strategy: Any, tmp_path: Path) -> None:
    kind = EmbOptimType[optimizer]
    module, other = (tables(score_strategy=strategy, optimizer=kind) for _ in range(2))
    for step in range(4):
        if strategy is Strategy.CUSTOMIZED:
            module.set_score({"t": 10 * step + 10})
        train(module, *range(step, step + 5))
    module.dump(tmp_path, optim=True)
    other.load(tmp_path, optim=True)
    scores = [each._scores["t"].dump_scores(torch.tensor([0, 3, 7])) for each in (module, other)]
    torch.testing.assert_close(*scores, rtol=0, atol=10**9 if strategy is Strategy.TIMESTAMP else 0)
    for step in range(4, 20):
        for each in (module, other):
            train(each, step, step + 1, 2)
    kept = [each._scores["t"].view for each in (module, other)]
    assert set(kept[0].ids().tolist()) == set(kept[1].ids().tolist())
    ids = kept[0].ids()
    for name, part in kept[0].read(ids).parts.items():
        assert torch.equal(part, kept[1].read(ids).parts[name]), name


def test_the_files_of_a_dump(tmp_path: Path) -> None:
    module = tables(score_strategy=Strategy.STEP, admit_strategy=FrequencyAdmissionStrategy(2, Args(Mode.CONSTANT)))
    train(module, 1, 1, 2)
    train(module, 3, 3)
    module.dump(tmp_path, optim=True, counter=True)
    end = "rank_0.world_size_1"
    read = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert np.frombuffer(read[f"t_emb_keys.{end}"], np.int64).tolist() == [1, 3]
    assert np.frombuffer(read[f"t_emb_scores.{end}"], np.int64).tolist() == [1, 2]
    rows = module._scores["t"].view.read(torch.tensor([1, 3])).parts
    assert np.array_equal(np.frombuffer(read[f"t_emb_values.{end}"], np.float32), rows["weight"].flatten().numpy())
    states = torch.cat([part for name, part in rows.items() if name != "weight"], dim=1)
    assert np.array_equal(np.frombuffer(read[f"t_emb_opt_values.{end}"], np.float32), states.flatten().numpy())
    assert np.frombuffer(read[f"t_counter_keys.{end}"], np.int64).tolist() == [2]
    assert np.frombuffer(read[f"t_counter_frequencies.{end}"], np.int64).tolist() == [1]
    meta = json.loads(read["t_opt_args.json"])
    assert meta["opt_type"] == "adam"
    assert (meta["iters"], meta["step_score"], meta["evict_strategy"]) == (2, 3, "EvictStrategy.KCustomized")
    other = tables(score_strategy=Strategy.STEP, admit_strategy=FrequencyAdmissionStrategy(2, Args(Mode.CONSTANT)))
    other.load(tmp_path, counter=True)
    train(other, 2)
    assert ids_of(other) == {1, 2, 3}
    assert other.get_score() == {"t": 4}


def test_scores_are_dropped_when_the_clock_is_set_back() -> None:
    module = tables(score_strategy=Strategy.STEP)
    train(module, 1)
    train(module, 2)
    scores = module._scores["t"]
    scores.view.set_clocks({"batches": 1})  # sets the clock back, as loading a save does
    train(module, 3)
    assert scores.increment_scores(torch.tensor([1, 3])).tolist() == [1, 3]


def test_a_load_of_an_older_dump(tmp_path: Path) -> None:
    """After the load, the next score is above all existing scores, and an id with a row is no longer a candidate."""
    admit = FrequencyAdmissionStrategy(2, Args(Mode.CONSTANT))
    module = tables(score_strategy=Strategy.STEP, admit_strategy=admit)
    train(module, 1)
    module.dump(tmp_path, counter=True)
    for _ in range(3):
        train(module, 1)
    module.load(tmp_path, counter=True)
    assert module.get_score() == {"t": 5}
    assert module._scores["t"].view.candidates()[0].tolist() == []


@pytest.mark.parametrize("bound", [0.25, 2.0])
def test_gradients_are_clipped_at_the_given_number(bound: float) -> None:
    options = Options(dim=4, max_capacity=16, embedding_dtype=torch.float32, initializer_args=Args(Mode.CONSTANT))
    given = {"learning_rate": 1.0, "gradient_clipping": True, "max_gradient": bound}
    module = Tables([options], ["t"], device=DEVICE, optimizer=EmbOptimType.SGD, **given)
    (3 * module(torch.tensor([5]), torch.tensor([0, 1]))).sum().backward()
    assert module.export_keys_values("t", torch.device("cpu"))[1].tolist() == [[-bound] * 4]


def test_a_dump_of_two_ranks(tmp_path: Path) -> None:
    from rec_sdk_torch.compat.dynamicemb.files import dump_table

    for rank, ids in enumerate(([2, 4], [1, 3, 5])):
        module = tables(score_strategy=Strategy.STEP)
        train(module, *ids)
        dump_table(module._scores["t"], tmp_path, rank, 2, optim=False, counter=False)
    other = tables(score_strategy=Strategy.STEP)
    other.load(tmp_path)
    assert ids_of(other) == {1, 2, 3, 4, 5}
    (tmp_path / "t_emb_keys.rank_1.world_size_2").unlink()
    with pytest.raises(FileNotFoundError, match=r"rank_1\.world_size_2"):
        other.load(tmp_path)


@pytest.mark.parametrize("dist_type", ["roundrobin", "hash_roundrobin", "continuous"])
def test_a_module_of_several_ranks_loads_its_rows(
    dist_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without sharding, the module takes its rank from the process group."""
    ids = list(range(-6, 6))
    module = tables(score_strategy=Strategy.STEP)
    train(module, *ids)
    module.dump(tmp_path)
    home = {"roundrobin": (-1, 0), "hash_roundrobin": (-2, 0), "continuous": (-3, 16)}[dist_type]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 3)
    for rank in range(3):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda *_, rank=rank: rank)
        other = tables(score_strategy=Strategy.STEP, dist_type=dist_type)
        if dist_type == "continuous":
            with pytest.raises(NotImplementedError, match="does not know the blocks of 3 ranks"):
                other.load(tmp_path)
            continue
        other.load(tmp_path)
        homes = owner_ranks(torch.tensor(ids).numpy(), home, 3).tolist()
        assert ids_of(other) == {i for i, at in zip(ids, homes, strict=True) if at == rank}


def test_a_dump_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    module = tables(score_strategy=Strategy.LFU)
    train(module, 1, 2)
    module.dump(tmp_path, optim=True)
    with pytest.raises(ValueError, match=r"has EvictStrategy\.KLfu, the table EvictStrategy\.KLru"):
        tables().load(tmp_path)
    with pytest.warns(UserWarning, match="states of adam, not of sgd"):
        tables(score_strategy=Strategy.LFU, optimizer=EmbOptimType.SGD).load(tmp_path, optim=True)
    with pytest.warns(UserWarning, match="no files of table 'u'"):
        tables(name="u").load(tmp_path)
    values = tmp_path / "t_emb_values.rank_0.world_size_1"
    values.write_bytes(values.read_bytes()[:-4])
    with pytest.raises(ValueError, match="has 28 bytes, expected"):
        tables(score_strategy=Strategy.LFU).load(tmp_path)


class Strange(dynamicemb.AdmissionStrategy):
    def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        return frequencies > 0

    def get_initializer_args(self) -> None:
        return None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"external_storage": object()}, "external_storage is not supported"),
        ({"index_type": torch.uint64}, "index_type is torch.uint64"),
        ({"initializer_args": Args(Mode.DEBUG)}, "DEBUG are not supported"),
        ({"admit_strategy": Strange()}, "admit_strategy is a Strange"),
        ({"admit_strategy": FrequencyAdmissionStrategy(2)}, "read as UNIFORM in training and as 0.0 in evaluation"),
        (
            {"admit_strategy": FrequencyAdmissionStrategy(2), "admission_counter": object()},
            "admission_counter is a object",
        ),
    ],
)
def test_options_without_a_counterpart(options: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        tables(**options)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Options(dist_type="no_such"), ValueError, "dist_type is 'no_such'"),
        (lambda: Options(eval_initializer_args=Args()), ValueError, "must be CONSTANT"),
        (
            lambda: Options(score_strategy=(Strategy.STEP, Strategy.LFU)),
            NotImplementedError,
            "the only supported tuple is TIMESTAMP with LFU",
        ),
        (lambda: Options(score_strategy=3), TypeError, "expected DynamicEmbScoreStrategy"),
        (lambda: FrequencyAdmissionStrategy(-1), ValueError, "threshold is -1"),
        (lambda: tables(score_strategy=None), ValueError, "score_strategy is None"),
    ],
)
def test_invalid_options_are_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
    assert Options(score_strategy=(Strategy.STEP,)).score_strategy is Strategy.STEP


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": EmbOptimType.LAMB}, "optimizer is"),
        ({"output_dtype": torch.float16}, "output_dtype is torch.float16"),
        ({"weight_decay": 0.1}, "only ADAM supports it"),
        ({"max_norm": 1.0}, "max_norm is 1.0"),
        ({"counter_based_regularization": object()}, "counter_based_regularization is"),
    ],
)
def test_fused_params_without_a_counterpart(given: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        DynamicEmbeddingCollectionSharder(fused_params=given)
    with pytest.raises(NotImplementedError, match="qcomm_codecs_registry"):
        DynamicEmbeddingBagCollectionSharder(qcomm_codecs_registry={"a": 1})
