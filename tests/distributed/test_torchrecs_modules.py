"""TorchRec's collections, modules, functions and pipelines with sharded tables of this package.

Optimizers of sharded tables match TorchRec's sharded tables, which use FBGEMM's optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.optim
from batches import jagged, random_bags
from collection_factory import apply, bag_config, bags_collection
from ranks import Place, Start, on_ranks
from sharded_model import Model, Scenario, assert_same, batches_of, optimizer_of, rows, shard, sharded, united, world
from torch.distributed.device_mesh import DeviceMesh
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.fp_embeddingbag import (
    FeatureProcessedEmbeddingBagCollectionSharder,
    ShardedFeatureProcessedEmbeddingBagCollection,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.shard import shard as torchrecs_shard
from torchrec.distributed.shard import shard_modules
from torchrec.distributed.sharding_plan import row_wise
from torchrec.distributed.train_pipeline import train_pipelines as pipelines
from torchrec.distributed.types import ShardingEnv2D
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.streamable import Pipelineable
from training import rows_of, train_step

import rec_sdk_torch as rst
from rec_sdk_torch.distributed.sharded import ShardedCollection

# ---- TorchRec's collections: on the host TorchRec shards them, on other devices this package does


SHARDING = {"t_user": "data_parallel", "t_item": "table_wise", "t_seen": "row_wise"}


class Stock(torch.nn.Module):
    """A model that uses only TorchRec's collections."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        item = EmbeddingBagConfig(40, 8, name="t_item", feature_names=["item"], pooling=PoolingType.MEAN)
        user = EmbeddingBagConfig(13, 8, name="t_user", feature_names=["user"])
        self.bags = EmbeddingBagCollection(tables=[user, item])
        self.rows = EmbeddingCollection(tables=[EmbeddingConfig(40, 4, name="t_seen", feature_names=["seen"])])

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        pooled, seen = self.bags(batch).values(), self.rows(batch)["seen"].values()
        return pooled.tanh().pow(2).sum() + seen.tanh().sum()


def batch_of_ranks(step: int, ranks: Sequence[int], keys: Sequence[str], ids: int) -> KeyedJaggedTensor:
    """Builds the joint batch of these ranks, with three samples per rank."""
    of_ranks = [random_bags(np.random.default_rng([step, rank]), keys, ids, batch_size=3) for rank in ranks]
    return jagged({key: [bag for bags in of_ranks for bag in bags[key]] for key in keys})


STOCK = ("user", "item", "seen"), 13
"""The keys, and the number of ids of each."""


def sharded_stock(kinds: dict[str, str]) -> Any:
    model = Stock()
    for tables in (model.bags, model.rows):
        apply_optimizer_in_backward(torch.optim.Adagrad, tables.parameters(), {"lr": 0.1, "eps": 1e-8})
    return shard(model, Scenario(), kinds=kinds)


@pytest.fixture
def off_host(device: torch.device) -> None:
    if device.type in ("cpu", "cuda"):
        pytest.skip("TorchRec's own sharders do it there")


def train_stock(rank: int, world_size: int) -> Any:
    """Trains the sharded model; returns (losses, weights of this rank by table and id)."""
    model = sharded_stock(SHARDING)
    assert all(isinstance(part, ShardedCollection) for part in (model.module.bags, model.module.rows))
    losses = []
    for step in range(5):
        loss = model(batch_of_ranks(step, [rank], *STOCK))
        loss.backward()
        losses.append(loss.item())
    state = {**model.module.bags.state_dict(), **model.module.rows.state_dict()}
    weights = {}
    for name in SHARDING:
        (key,) = [key for key in state if key.endswith(f".{name}.weight")]
        weights[name] = dict(zip(state[key.replace("weight", "ids")].tolist(), state[key].cpu(), strict=True))
    return losses, weights


@pytest.mark.usefixtures("off_host")
def test_stock_tables_train_like_one_process(ranks_of: Start) -> None:
    results = ranks_of(2).run(train_stock)
    alone, losses = Stock(), []
    optimizer = torch.optim.Adagrad(alone.parameters(), lr=0.1, eps=1e-8)
    for step in range(5):
        optimizer.zero_grad()
        loss = alone(batch_of_ranks(step, [0, 1], *STOCK))
        (loss / 2).backward()
        optimizer.step()
        losses.append(loss.item())
    assert [sum(each) for each in zip(*(found for found, _ in results), strict=True)] == pytest.approx(losses, rel=1e-5)
    found = united([weights for _, weights in results], list(SHARDING.values()))
    for name, weight in alone.named_parameters():
        table = name.split(".")[-2]
        whole = torch.stack([found[table][i] for i in range(len(weight))])
        torch.testing.assert_close(whole, weight.detach(), rtol=1e-5, atol=1e-6, msg=name)


@on_ranks(2)
@pytest.mark.usefixtures("off_host")
def test_replicas_start_with_the_rows_of_rank_0(rank: int) -> Any:
    """Each rank initializes the replicated table with another seed; after sharding, all have rank 0's rows."""
    with pytest.MonkeyPatch.context() as patch:
        seed = torch.manual_seed
        patch.setattr(torch, "manual_seed", lambda _: seed(7 + rank))
        model = sharded_stock(SHARDING)
    state = model.module.bags.state_dict()
    (key,) = [key for key in state if key.endswith(".t_user.weight")]
    assert not torch.equal(state[key].cpu(), Stock().bags.embedding_bags["t_user"].weight)
    return state[key].tolist()


@on_ranks(2)
def test_torchrec_shards_its_tables_on_the_host() -> None:
    if Place.device.type == "cpu":  # on other devices, this package's sharders do it
        assert type(sharded_stock({}).module.bags) is ShardedEmbeddingBagCollection


# ---- TorchRec's modules that contain a collection


KEYS = ["f0", "f1"]
FIELDS: dict[str, Any] = {"num_embeddings": 31, "embedding_dim": 4}


def tables(weighted: bool = False, seed: int = 3) -> Any:
    configs = bag_config("hash", **FIELDS), EmbeddingBagConfig(name="index", feature_names=["f1"], **FIELDS)
    collection = bags_collection(Place.device, *configs, cache=31, is_weighted=weighted, seed=seed)
    rst.apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.1})
    return collection


class Processed(torch.nn.Module):
    """A model whose bags have trained weights by position."""

    def __init__(self, inside: Any) -> None:
        super().__init__()
        processors: Any = {key: PositionWeightedModule(8, device=Place.device) for key in KEYS}
        self.bags = FeatureProcessedEmbeddingBagCollection(inside, processors)
        for i, weight in enumerate(self.bags._feature_processors.parameters()):
            drawn = torch.empty(weight.shape).uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(i))
            weight.data.copy_(drawn)  # drawn on the host, so the values are the same on every device

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        return self.bags(batch).values().pow(2).sum()


def sharded_module(module: torch.nn.Module, kind: str | None) -> Any:
    return shard(module, Scenario(), kinds={"hash": kind, "index": kind})


def train_processed(rank: int, world_size: int, kind: str | None = "alone") -> Any:
    """Trains; returns the rows and position weights of a rank, or of one process with both ranks' batches."""
    alone = kind == "alone"
    made = Processed(tables(weighted=True, seed=3 + rank))
    run = made if alone else sharded_module(made, kind)
    bags = made.bags if alone else run.module.bags
    assert alone or type(bags._embedding_bag_collection) is ShardedCollection
    weights = list(bags._feature_processors.parameters())
    dense = torch.optim.SGD(weights, lr=0.05)
    for step in range(3):
        # the device of the weights
        batch = batch_of_ranks(step, [0, 1] if alone else [rank], KEYS, 31).to(Place.device)
        dense.zero_grad()
        (run(batch) / (2 if alone else 1)).backward()
        dense.step()
    state, found = bags._embedding_bag_collection.state_dict(), {}
    for name in ("hash", "index"):
        weight = state[f"embedding_bags.{name}.weight"].cpu()
        ids = state.get(f"embedding_bags.{name}.ids", torch.arange(len(weight)))
        found[name] = dict(zip(ids.tolist(), weight, strict=True))
    return found, [weight.detach().cpu() for weight in weights]


@pytest.mark.parametrize("kind", [None, "row_wise"])
def test_processed_features(ranks_of: Start, kind: str | None) -> None:
    results = ranks_of(2).run(train_processed, kind)
    expected, weights_alone = train_processed(0, 2)
    for table, values in expected.items():
        found = {i: row for of_rank, _ in results for i, row in of_rank[table].items()}
        assert found.keys() == values.keys()
        assert all(torch.allclose(found[i], row, 1e-5, 1e-6) for i, row in values.items()), table
    for _, weights in results:
        torch.testing.assert_close(weights, weights_alone, rtol=1e-5, atol=1e-6)


def torchrecs_own(rank: int, world_size: int) -> str:
    configs = [EmbeddingBagConfig(name="t", feature_names=KEYS, **FIELDS)]
    inside = EmbeddingBagCollection(configs, is_weighted=True, device=torch.device("meta"))
    return type(sharded_module(Processed(inside), None).module.bags).__name__


def test_processed_features_of_torchrecs_collection(device: torch.device, ranks_of: Start) -> None:
    if device.type == "npu":
        pytest.skip("TorchRec has no kernels for it")
    assert ranks_of(2).run(torchrecs_own) == [ShardedFeatureProcessedEmbeddingBagCollection.__name__] * 2


def test_torchrecs_sharder_of_processed_features_is_refused() -> None:
    module = Processed(tables(weighted=True)).bags
    with pytest.raises(ValueError, match=r"around EmbCacheEmbeddingBagCollection: .*get_default_hybrid_sharders"):
        FeatureProcessedEmbeddingBagCollectionSharder().shardable_parameters(module)


@pytest.mark.parametrize("pooled", [True, False])
def test_managed_collision_is_refused(pooled: bool) -> None:
    device, cls = torch.device("cpu"), EmbeddingBagConfig if pooled else EmbeddingConfig
    configs: Any = [cls(name="index", feature_names=["f"], **FIELDS)]
    policy = DistanceLFU_EvictionPolicy()
    remap: Any = {"index": MCHManagedCollisionModule(31, device, policy, eviction_interval=2)}
    collisions = ManagedCollisionCollection(remap, configs)
    make: Any = rst.EmbCacheEmbeddingBagCollection if pooled else rst.EmbCacheEmbeddingCollection
    around: Any = ManagedCollisionEmbeddingBagCollection if pooled else ManagedCollisionEmbeddingCollection
    with pytest.raises(TypeError, match="Hash tables need none, they take any id"):
        around(make(configs, cache=31, device="cpu"), collisions)
    if pooled:
        around(EmbeddingBagCollection(configs), collisions)


@on_ranks(2)
@pytest.mark.parametrize("inside", [False, True], ids=["shard", "shard_modules"])
def test_modules_sharded_by_torchrecs_functions(rank: int, inside: bool) -> None:
    """A module returns the same lookups after TorchRec's functions have sharded it."""
    batch = jagged({"f0": [[1, 2], [7]], "f1": [[rank], [3, 4]]})
    expected = tables().eval()(batch).values()
    if inside:
        model = torch.nn.ModuleDict({"tables": tables()})
        sharders = rst.get_default_hybrid_sharders()
        found: Any = shard_modules(model, world(), Place.device, sharders=sharders)["tables"]
    else:
        sharder = rst.EmbCacheEmbeddingBagCollectionSharder()
        found = torchrecs_shard(tables(), row_wise(), world(), Place.device, sharder)
    assert type(found) is ShardedCollection
    assert torch.equal(found.eval()(batch).values(), expected)


# ---- pipelines, 2D environments and resharding


SCENARIO = Scenario(optimizer=torch.optim.Adagrad, options={"eps": 1e-3}, steps=5, sizes=((3, 2), (2, 4)), seed=5)
SAME, NO_CUDA, NO_PREFETCH = "same", "Torch not compiled with CUDA", "Invalid PrefetchPipelinedForward usage"
ON_HOSTS = {
    "TrainPipelineBase": SAME,
    "TrainPipelinePT2": SAME,
    "TrainPipelineSparseDist": SAME,
    "TrainPipelineSparseDistLite": SAME,
    "TrainPipelineFusedSparseDist": NO_CUDA,
    "TrainPipelineSemiSync": NO_CUDA,
    "PrefetchTrainPipelineSparseDist": NO_PREFETCH,
}
"""The options of the table in docs/torch.md."""


class Sample(Pipelineable):
    def __init__(self, ids: Any) -> None:
        self.ids = ids

    def to(self, device: torch.device, non_blocking: bool = False) -> Sample:
        return Sample(self.ids.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: Any) -> None:
        """Does nothing: the tensors are on the host."""


class OfSamples(Model):
    def forward(self, batch: Any) -> Any:
        return super().forward(batch.ids)


def trained(name: str | None) -> Any:
    """Trains in a pipeline or a plain loop; returns the rows and the dense parameter."""
    torch.manual_seed(0)
    model: Any = shard(OfSamples(SCENARIO, 3, cache=1000), SCENARIO)
    optimizer = optimizer_of(model.module, lr=0.05)
    batches = map(Sample, batches_of(SCENARIO, SCENARIO.steps))
    if name is None:
        for batch in batches:
            optimizer.zero_grad()
            model(batch)[0].backward()
            optimizer.step()
    else:
        compiled = {"compile_configs": pipelines.TorchCompileConfig(backend="eager")}
        options = compiled if name == "TrainPipelinePT2" else {}
        pipeline = getattr(pipelines, name)(model, optimizer, Place.device, **options)
        try:
            while True:
                pipeline.progress(batches)
        except StopIteration:
            pass
    return rows(model.module.sparse), model.module.scale.detach().clone()


def stock_pipelines(rank: int, world_size: int, names: list[str]) -> None:
    expected = trained(None)
    for name in names:
        if ON_HOSTS[name] is SAME:
            assert_same(trained(name), expected, name)
        else:
            with pytest.raises(AssertionError, match=ON_HOSTS[name]):
                trained(name)


def test_stock_pipelines_over_sharded_tables(ranks_of: Start, device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("TorchRec's pipelines ask for CUDA")
    ranks_of(2).run(stock_pipelines, list(ON_HOSTS))


@on_ranks(2)
def test_groups_of_ranks_and_other_plans_are_refused(rank: int, world_size: int) -> None:
    alone = [torch.distributed.new_group([each]) for each in range(world_size)][rank]
    group = torch.distributed.group.WORLD
    mesh = DeviceMesh("cpu", [[each] for each in range(world_size)])
    model = Model(SCENARIO, 3)
    sharder = rst.EmbCacheEmbeddingBagCollectionSharder()
    with pytest.raises(ValueError, match="sharding_group_size is 1 of 2 ranks"):
        sharder.shard(model.sparse, {}, ShardingEnv2D(alone, group, group, mesh), Place.device)
    with pytest.raises(NotImplementedError, match=r"\['t0', 't1', 't2'\].* stay where their plan has put them"):
        sharded(SCENARIO).reshard({"sparse": (0.0, SimpleNamespace())}, "sparse")


# ---- optimizers


KEY = "embedding_bags.t0.weight"
FACTORS = torch.tensor([1.0, -2.0, 3.0, 0.5])


def updated(cls: type, options: dict[str, Any], scale: float = 1.0, ours: bool = True) -> torch.Tensor:
    """Returns the weight after two training steps of a table that was initialized to zero."""
    config = EmbeddingBagConfig(num_embeddings=8, embedding_dim=4, name="t0", feature_names=["f0"])
    config.init_fn = torch.nn.init.zeros_
    device = Place.device
    if ours:
        tables = rst.EmbCacheEmbeddingBagCollection([config], device=device, cache=1.0)
    else:
        tables = EmbeddingBagCollection(tables=[config])
    torch.distributed.optim._apply_optimizer_in_backward(cls, tables.parameters(), dict(options))
    sharders = rst.get_default_hybrid_sharders() if ours else [EmbeddingBagCollectionSharder()]
    constraints = {"t0": ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])}
    planner = EmbeddingShardingPlanner(Topology(1, "cpu"), constraints=constraints)
    plan = planner.collective_plan(tables, sharders, torch.distributed.group.WORLD)
    model = DistributedModelParallel(tables, world(), device if ours else torch.device("cpu"), plan, sharders)
    for _ in range(2):
        values = model(jagged({"f0": [[1], [2, 3]]})).values()
        (values * scale * FACTORS.to(values.device)).sum().backward()
    weight: Any = model.state_dict()[KEY]
    return weight if ours else weight.local_shards()[0].tensor


@on_ranks(1)
@pytest.mark.parametrize("scale", [1e-8, 1.0])
@pytest.mark.parametrize("options", [{}, {"lr": 0.5}, {"lr": 0.5, "eps": 1e-6}], ids=str)
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adagrad, RowWiseAdagrad])
def test_updates_are_torchrecs(cls: type, options: dict[str, Any], scale: float) -> None:
    options = {name: value for name, value in options.items() if cls is not torch.optim.SGD or name == "lr"}
    found, expected = (updated(cls, options, scale, ours) for ours in (True, False))
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=0)
    assert expected[1:4].all()


@on_ranks(1)
def test_a_small_gradient_shows_eps() -> None:
    """FBGEMM's eps is 1e-8, so the first step with lr 0.9 and a gradient of 1e-8 has length 0.45."""
    found = updated(torch.optim.Adagrad, {"lr": 0.9}, 1e-8)
    assert found[1, 0].item() == pytest.approx(-0.9 / 2 - 0.9 / (1 + 2**0.5))


@on_ranks(1)
def test_weight_decay_of_adam_is_decoupled() -> None:
    """FBGEMM's ADAM also decouples it; `tests/fbgemm` compares that with AdamW's formula."""
    options = {"lr": 0.5, "weight_decay": 0.1}
    found = updated(torch.optim.Adam, options)
    assert torch.equal(found, updated(torch.optim.AdamW, options))
    assert not torch.equal(found, updated(torch.optim.Adam, {"lr": 0.5}))


def test_weight_decay_of_adam_is_torchs_without_ranks(device: torch.device) -> None:
    """Without ranks, weight decay is added to the gradient: with gradient 0, the first step moves each weight by lr."""
    collection = bags_collection(device, bag_config(weight_init_min=2.0, weight_init_max=2.0))
    apply(collection, torch.optim.Adam, lr=0.25, weight_decay=0.1)
    train_step(collection, jagged({"f0": [[1]]}), factor=0.0)
    torch.testing.assert_close(rows_of(collection)[1], torch.full((4,), 2.0 - 0.25))


@on_ranks(1)
@pytest.mark.parametrize(("cls", "eps"), [(torch.optim.SGD, {}), (torch.optim.Adagrad, {"eps": 1e-3})])
def test_weight_decay_that_torchrec_drops(cls: Any, eps: dict[str, float]) -> None:
    """TorchRec drops weight decay with these optimizers; this package adds it to the gradient, as torch does."""
    options = {"lr": 0.5, "weight_decay": 0.5, **eps}
    decayed, rows = updated(cls, options), torch.nn.Parameter(torch.zeros(8, 4))
    optimizer = cls([rows], **options)
    for _ in range(2):
        rows.grad = torch.zeros(8, 4)
        rows.grad[1:4] = FACTORS
        optimizer.step()
    torch.testing.assert_close(decayed[1:4], rows.detach()[1:4])
    assert not torch.equal(decayed, updated(cls, {"lr": 0.5, **eps}))
