"""Tests of models that test_dynamicemb.py runs in a separate process with `python -m rec_sdk_torch.compat`."""

from __future__ import annotations

import copy
import importlib.util
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dynamicemb import DynamicEmbInitializerArgs as Args
from dynamicemb import DynamicEmbInitializerMode as Mode
from dynamicemb import DynamicEmbScoreStrategy as Strategy
from dynamicemb import DynamicEmbTableOptions as Options
from dynamicemb import FrequencyAdmissionStrategy
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2 as Tables
from dynamicemb.dump_load import DynamicEmbDump, DynamicEmbLoad, find_sharded_modules, get_dynamic_emb_module
from dynamicemb.incremental_dump import get_score, incremental_dump, set_score
from dynamicemb.optimizer import EmbOptimType
from dynamicemb.planner import DynamicEmbeddingShardingPlanner, DynamicEmbParameterConstraints
from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder, DynamicEmbeddingCollectionSharder
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from under_dynamicemb import ids_of, tables, train

DEVICE = torch.device("cuda:0")
"""The NPU or the CPU: compat maps the name "cuda" to them if there is no CUDA."""


@pytest.fixture(scope="module")
def _group(tmp_path_factory: pytest.TempPathFactory) -> Any:
    store = f"file://{tmp_path_factory.mktemp('group') / 'store'}"
    torch.distributed.init_process_group("nccl", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Bags(torch.nn.Module):
    def __init__(self, pooled: bool) -> None:
        super().__init__()
        names, kind = ("a", "b"), EmbeddingBagConfig if pooled else EmbeddingConfig
        configs = [kind(name=n, num_embeddings=32, embedding_dim=4, feature_names=[n]) for n in names]
        collection = EmbeddingBagCollection if pooled else EmbeddingCollection
        self.bags = collection(tables=configs, device=torch.device("meta"))
        self.pooled = pooled

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        rows = self.bags(features)
        return rows.values() if self.pooled else torch.cat([rows[name].values() for name in ("a", "b")])


def model(strategy: Strategy, pooled: bool = True, cls: type = DynamicEmbeddingBagCollectionSharder) -> Any:
    torch.manual_seed(0)
    bags = Bags(pooled)
    configs = bags.bags.embedding_bag_configs() if pooled else bags.bags.embedding_configs()
    options = Options(score_strategy=strategy, bucket_capacity=16)
    constraints = {
        "a": DynamicEmbParameterConstraints(use_dynamicemb=True, dynamicemb_options=options),
        "b": DynamicEmbParameterConstraints(sharding_types=["row_wise"]),
    }
    sharder = cls(fused_params={"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1})
    topology = Topology(1, DEVICE.type, hbm_cap=2**34)
    planner = DynamicEmbeddingShardingPlanner(configs, topology, constraints=constraints, debug=False)
    plan = planner.collective_plan(bags, [sharder], torch.distributed.group.WORLD)
    return DistributedModelParallel(bags, device=DEVICE, plan=plan, sharders=[sharder])


def step(of: Any, *ids: int) -> torch.Tensor:
    batch = KeyedJaggedTensor(["a", "b"], torch.tensor([*ids, 1, 2]), lengths=torch.tensor([len(ids), 2]))
    out = of(batch)
    out.sum().backward()
    return out.detach()


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize(
    ("pooled", "sharder"), [(True, DynamicEmbeddingBagCollectionSharder), (False, DynamicEmbeddingCollectionSharder)]
)
def test_dynamic_tables_beside_others(pooled: bool, sharder: type, tmp_path: Path) -> None:
    first = model(Strategy.CUSTOMIZED, pooled, sharder)
    assert [each[:2] for each in find_sharded_modules(first)] == [("model.bags", "bags")]
    (found,) = get_dynamic_emb_module(first)
    assert found.table_names == ["a"]
    set_score(first, 3)
    step(first, 2**62, -5)
    set_score(first, {"bags": {"a": 4}})
    assert get_score(first) == {"model.bags": {"a": 4}}
    step(first, 7)
    rows, scores = incremental_dump(first, {"model.bags": {"a": 4}}, torch.distributed.group.WORLD)
    assert rows["model.bags"]["a"][0].tolist() == [7]
    assert scores == {"model.bags": {"a": 4}}
    DynamicEmbDump(tmp_path / "dump", first, {"model.bags": ["a"]}, optim=True)
    with pytest.raises(FileExistsError, match="has files"):
        DynamicEmbDump(tmp_path / "dump", first)
    second = model(Strategy.CUSTOMIZED, pooled, sharder)
    DynamicEmbLoad(tmp_path / "dump", second, optim=True)
    ids, weights = found.export_keys_values("a", torch.device("cpu"))
    assert set(ids.tolist()) == {2**62, -5, 7}
    again = get_dynamic_emb_module(second)[0]._scores["a"].view.read(ids, ["weight"]).parts["weight"]
    assert torch.equal(weights, again)
    first.eval()
    batch = KeyedJaggedTensor(["a", "b"], torch.tensor([99, 9]), lengths=torch.tensor([1, 1]))
    assert (first(batch)[:, :4] == 0).all() or not pooled


@pytest.mark.usefixtures("_group")
def test_invalid_models_and_arguments_are_refused(tmp_path: Path) -> None:
    plain = torch.nn.Linear(1, 1)
    with pytest.warns(UserWarning, match="no sharded collection with dynamic tables"):
        assert get_score(plain) is None
    with pytest.warns(UserWarning, match="nothing is dumped"):
        assert incremental_dump(plain, 1) is None
    for wrong in (1.5, True, {"a": 1}, {"a": {"b": "c"}}):
        with pytest.raises(ValueError, match="expected an int"):
            set_score(plain, wrong)
    first = model(Strategy.STEP)
    with pytest.warns(UserWarning, match=r"there are no \['other'\]"):
        incremental_dump(first, {"other": {"a": 1}})
    with pytest.warns(UserWarning, match=r"there are no \['other'\], only \['model.bags'\]"):
        DynamicEmbDump(tmp_path / "dump", first, {"other": ["a"]})
    with pytest.warns(UserWarning, match=r"there are no \['other'\], only \['model.bags'\]"):
        DynamicEmbLoad(tmp_path / "dump", first, {"other": ["a"]})
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        DynamicEmbLoad(tmp_path / "nothing", first)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="is no folder"):
        DynamicEmbDump(tmp_path / "file", first)
    with pytest.raises(ValueError, match="each table once in both"):
        DynamicEmbeddingShardingPlanner(Bags(True).bags.embedding_bag_configs(), Topology(1, "cpu"), constraints={})


def test_cuda_selects_the_available_device() -> None:
    assert DEVICE.type in ("cpu", "npu")
    assert isinstance(DEVICE, torch.device)
    assert issubclass(type(DEVICE), torch.device)
    assert torch.device("meta").type == "meta"
    assert torch.device(type="cuda").type == DEVICE.type
    assert pickle.loads(pickle.dumps(DEVICE)) == copy.deepcopy(DEVICE) == DEVICE
    assert torch.ones(1).cuda().device.type == torch.nn.Linear(1, 1).cuda().weight.device.type == DEVICE.type
    torch.cuda.set_device(0)
    torch.cuda.synchronize()
    assert torch.cuda.current_device() == 0
    assert torch.cuda.device_count() >= 1


def candidates_of(module: Tables) -> set[int]:
    return set(module._scores["t"].view.candidates()[0].tolist())


def test_counts_of_a_dump_saturate_like_tables(tmp_path: Path) -> None:
    admit = FrequencyAdmissionStrategy(2**40, Args(Mode.CONSTANT))
    for strategy, kind, ids in ((None, "emb_scores", ids_of), (admit, "counter_frequencies", candidates_of)):
        module, other = (tables(score_strategy=Strategy.LFU, admit_strategy=strategy) for _ in range(2))
        train(module, 1, 2, 3, 4)
        module.dump(tmp_path, counter=True)
        scores = tmp_path / f"t_{kind}.rank_0.world_size_1"
        np.array([2**31, 2**32 - 1, 2**40, -1]).tofile(scores)
        with pytest.warns(UserWarning, match=r"2 counts of the dump exceed 2\*\*32 - 1"):
            other.load(tmp_path, counter=True)
        counts = other._scores["t"].view
        assert ids(other) == {1, 2, 3, 4}
        found = counts.candidates()[1] if strategy else counts.row_columns(torch.arange(1, 5))
        assert found["count"].tolist() == [2**31, *[2**32 - 1] * 3]


def test_lr_is_the_learning_rate() -> None:
    sharder = DynamicEmbeddingCollectionSharder(fused_params={"optimizer": EmbOptimType.SGD, "lr": 0.25})
    assert sharder._options["learning_rate"] == 0.25
    assert DynamicEmbeddingCollectionSharder(fused_params={"lr": None})._options["learning_rate"] == 0.01
    rates: list[dict[str, Any]] = [{"lr": 0.25, "learning_rate": 0.5}, {"lr": 0.25, "learning_rate": 0.25}]
    with pytest.raises(ValueError, match=r"lr is 0\.25 and learning_rate is 0\.5, which mean the same"):
        DynamicEmbeddingCollectionSharder(fused_params=rates[0])
    assert DynamicEmbeddingCollectionSharder(fused_params=rates[1])._options["learning_rate"] == 0.25


MODULES = "it has dynamicemb.batched_dynamicemb_tables, "
ABSENT = f"named .dynamicemb.exportable_tables.: rec_sdk_torch.compat takes the name of .dynamicemb., and {MODULES}"


@pytest.mark.parametrize(
    ("statement", "kind", "message"),
    [
        ("from dynamicemb import key_value_table", ImportError, "module 'dynamicemb' .* has no 'key_value_table'; it"),
        ("from dynamicemb.planner import get_planner", ImportError, "no 'get_planner'; it has DynamicEmbParameter"),
        ("import dynamicemb.exportable_tables", ModuleNotFoundError, ABSENT),
        ("from dynamicemb.scored_hashtable import X", ModuleNotFoundError, MODULES),
        ("import dynamicemb.planner.inner", ModuleNotFoundError, "it has no submodules|is not a package"),
    ],
)
def test_missing_names_are_explained(statement: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(ImportError, match=message) as caught:
        exec(statement)
    assert caught.type is kind
    assert "unknown location" not in str(caught.value)


def test_hasattr_works_for_missing_names() -> None:
    import dynamicemb

    assert not hasattr(dynamicemb, "key_value_table")
    assert importlib.util.find_spec("dynamicemb.exportable_tables") is None
    with pytest.raises(AttributeError, match="has no 'key_value_table'; it has AdmissionStrategy"):
        dynamicemb.key_value_table  # noqa: B018
