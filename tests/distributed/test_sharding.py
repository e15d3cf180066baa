"""Plans, state dicts, numbers of exchanged bytes, pipelines and errors of sharded collections."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import jagged
from collection_factory import apply, bag_config, bags_collection
from ranks import Place, Start, on_ranks
from sharded_model import (
    Model,
    Scenario,
    assert_rows,
    assert_same,
    bags_of,
    batches_of,
    concatenated,
    plan_of,
    rows,
    shard,
    shard_tables,
    sharded,
    train,
    train_alone,
    united,
    world,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.train_pipeline import TrainPipelinePT2, TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.train_pipelines import TorchCompileConfig
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

import rec_sdk_torch as rst
from rec_sdk_torch.runtime.host_groups import host_group

PLAIN = Scenario()
ADAGRAD, ADAM = torch.optim.Adagrad, torch.optim.Adam


# ---- refused plans and options


@on_ranks(2)
def test_wrong_plans_are_refused(world_size: int) -> None:
    sharder = rst.EmbCacheEmbeddingBagCollectionSharder()
    for plan, message in (
        (plan_of(["t0"], "column_wise", [0]), "'t0': sharding type 'column_wise'.*'row_wise', 'table_wise'"),
        (plan_of(["t0"], "table_wise", [world_size]), "'t0': table_wise on ranks"),
        (plan_of(["t0"], "table_wise", [0, 1]), "'t0': table_wise on ranks"),
        (plan_of([]), "lacks tables \\['t0'\\]"),
        (plan_of(["t0", "t9"]), "unknown ones \\['t9'\\]"),
    ):
        with pytest.raises(ValueError, match=message):
            sharder.shard(bags_collection(Place.device), plan, world(), Place.device)
    constraints = {"t0": ParameterConstraints(sharding_types=["column_wise"])}
    planner = EmbeddingShardingPlanner(Topology(world_size, "cpu"), constraints=constraints)
    with pytest.raises(RuntimeError, match=r"No available sharding type.* for t0"):
        planner.plan(Model(PLAIN, 0), rst.get_default_hybrid_sharders(world()))


def exchange_of(host: Any, model: Any) -> Any:
    # A ShardingEnv is not constructed here, because it would create more process groups.
    cpu_env: Any = None if host is None else SimpleNamespace(process_group=host)
    sharder = rst.EmbCacheEmbeddingBagCollectionSharder(cpu_env=cpu_env)
    return sharder.shard(bags_collection(Place.device), plan_of(["t0"]), model, Place.device).exchange


@on_ranks(2)
def test_process_groups_for_ids(rank: int, world_size: int) -> None:
    """Without `cpu_env`, ids use a gloo group with the model's ranks and timeout; all collections share it.

    If the model's process group is itself a gloo group of some ranks, ids use that group.
    """
    model = world()
    first, second = exchange_of(None, model), exchange_of(None, model)
    assert first.ids is second.ids is not first.rows
    assert first.rows is model.process_group
    assert torch.distributed.get_backend(first.ids) == "gloo"
    parts = [torch.distributed.new_group([i], timeout=timedelta(seconds=77)) for i in range(world_size)]
    ids = host_group(parts[rank], "ids")
    assert torch.distributed.get_process_group_ranks(ids) == [rank]
    assert ids._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
    of_part = exchange_of(None, SimpleNamespace(process_group=parts[rank]))
    assert of_part.ids is (parts[rank] if Place.device.type == "cpu" else ids)
    given = torch.distributed.new_group(backend="gloo")
    assert exchange_of(given, model).ids is given
    elsewhere = torch.distributed.new_group(backend="cuda:gloo")
    with pytest.raises(ValueError, match="cpu_env does not exchange tensors in host memory: give it gloo"):
        exchange_of(elsewhere, model)
    with pytest.raises(ValueError, match=rf"groups of ranks \[\[{rank}\], \[0, 1\].*they must agree"):
        exchange_of(ids, model)


def test_no_process_group() -> None:
    with pytest.raises(ValueError, match="a process group is needed"):
        rst.EmbCacheEmbeddingBagCollectionSharder().shard(
            bags_collection(torch.device("cpu")), plan_of(["t0"]), ShardingEnv.from_local(2, 0)
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpu_device": "cuda:0"}, "cpu_device is 'cuda:0'"),
        ({"fused_params": {"eps": 1e-8}}, "fused_params has .'eps'"),
        ({"qcomm_codecs_registry": {"x": 1}}, "float32"),
    ],
)
def test_options_that_are_not_supported(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rst.EmbCacheEmbeddingBagCollectionSharder(**options)


def idle_ids(rank: int, world_size: int) -> tuple[int, int, int]:
    model, rules = Model(PLAIN, 0), rst.AdmitAndEvictConfig(evict_idle_steps=2)
    model.sparse = bags_collection(Place.device, bag_config(admit_and_evict_config=rules), cache=20)
    apply(model.sparse)
    divided: Any = shard(model, Scenario(sharding=("row_wise",)))
    sparse, dense = divided.module.sparse, torch.optim.SGD([divided.module.scale], lr=0.05)
    pipeline: Any = rst.EmbCacheTrainPipelineSparseDist(divided, dense, "cpu", Place.device, evict_step_interval=3)
    batches = iter([jagged({"f0": [[number, 100 + number]]}) for number in (1, 2, 3, 3)])
    left = []
    for _ in range(4):
        pipeline.progress(batches)
        left.append(sparse.cache_stats()["evicted"])
    return left[1], left[3], sparse.evict("t0")


def test_idle_ids_are_evicted_on_their_owner_ranks(ranks_of: Start) -> None:
    early, third, on_request = zip(*ranks_of(2).run(idle_ids), strict=True)
    assert early == (0, 0), "the interval is three steps"
    assert sum(third) == 2, "1 and 101, after the third"
    assert sum(on_request) == 2, "2 and 102, when asked for"


# ---- devices


@on_ranks(2)
def test_shards_are_on_the_device_of_the_wrapper() -> None:
    """Shards are on the `device` of DistributedModelParallel; by default, on the host."""
    sharder = rst.EmbCacheEmbeddingBagCollectionSharder()
    plan, meta = plan_of(["t0"]), torch.device("meta")
    assert sharder.shard(bags_collection(meta), plan, world()).device == torch.device("cpu"), "TorchRec's default"
    assert sharder.shard(bags_collection(meta), plan, world(), Place.device).device == Place.device
    assert sharder.shard(bags_collection(Place.device), plan, world()).device == Place.device
    if Place.device.type != "cpu":
        with pytest.warns(UserWarning, match=rf"'t0'.* are on {Place.device}, .* onto cpu.*device='{Place.device}'"):
            sharder.shard(bags_collection(Place.device), plan, world(), torch.device("cpu"))


def under_a_default_device(scenario: Scenario, default: str | torch.device) -> Any:
    batches, outputs = list(batches_of(scenario, scenario.steps)), []
    with torch.device(default):
        model = sharded(scenario)
        for batch in batches:
            loss, output = model(batch)
            loss.backward()
            outputs.append(output)
        model.eval()
        outputs.append(model(batches[0])[1])
        return outputs, rows(model.module.sparse)


@on_ranks(2)
def test_a_default_device_changes_nothing() -> None:
    default = "meta" if Place.device.type == "cpu" else "cpu"
    for scenario in (
        Scenario(weighted=True, optimizer=ADAM, dims=(4, 8, 4), cache=40, seed=24),
        Scenario("sequences", admit=2, seed=25),
    ):
        plain, other = (under_a_default_device(scenario, which) for which in (Place.device, default))
        assert_same(other, plain)


# ---- initial weights


def made_towers(seed: int, device: torch.device) -> list[Any]:
    """Builds two collections with the same table name and `seed=None`."""
    config = bag_config(initializer_type=rst.InitializerType.UNIFORM)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return [bags_collection(device, config, seed=None) for _ in range(2)]


@on_ranks(2)
def test_collections_without_a_seed_differ_and_match_one_process(rank: int) -> None:
    """If torch's seeds differ between ranks, each collection uses the seed of rank 0."""
    batch = jagged({"f0": [[1], [4], [7]]})
    expected = [each.eval()(batch).values() for each in made_towers(6, torch.device("cpu"))]
    found = [shard_tables(each).eval()(batch).values().cpu() for each in made_towers(6 + rank, Place.device)]
    assert not torch.equal(*expected)
    assert_same(found, expected)


# ---- no plan


@on_ranks(2)
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.filterwarnings("ignore:DistributedDataParallel averages")
def test_sharding_without_a_plan(ours: bool) -> None:
    """A script may leave planning to DistributedModelParallel.

    Without this package's sharders, tables stay unsharded.
    """
    options: dict[str, Any] = {"sharders": rst.get_default_hybrid_sharders()} if ours else {}
    model = train(DistributedModelParallel(Model(PLAIN, 3), device=Place.device, **options), PLAIN, range(2))
    assert type(model.module.sparse).__name__ == ("ShardedCollection" if ours else "EmbCacheEmbeddingBagCollection")
    assert model.module.sparse.device.type == Place.device.type


def test_npus_are_planned_by_host_memory() -> None:
    """The planner treats NPUs like hosts, since rows are stored in host memory."""
    npus, hosts = (Topology(2, kind, hbm_cap=1, ddr_cap=2**40) for kind in ("npu", "cpu"))
    assert [device.storage for device in npus.devices] == [device.storage for device in hosts.devices]
    assert Topology(world_size=2, compute_device="npu").compute_device == "cpu"
    assert Topology(2, "cuda", hbm_cap=5).devices[0].storage.hbm == 5
    with pytest.raises(AssertionError, match="unsupported compute device tpu"):
        Topology(2, "tpu")


# ---- state


@on_ranks(2)
@pytest.mark.parametrize("inside", [False, True])
def test_state_dict_round_trip(rank: int, world_size: int, inside: bool) -> None:
    """State dicts load into the wrapped model and into `module`, the inner model."""
    scenario = Scenario(optimizer=ADAM, seed=20)
    trained = train(sharded(scenario), scenario, range(3))
    state, states = trained.state_dict(), trained.fused_optimizer.state_dict()
    fresh = train(sharded(scenario), scenario, range(7, 8))  # the seed of ids that do not exist yet
    loading = fresh.module if inside else fresh
    result = loading.load_state_dict({**{n: v.clone() for n, v in state.items()}, "sparse.x": 0}, strict=False)
    assert result == ([], ["sparse.x" if inside else "x"]), "DistributedModelParallel leaves the prefix out"
    fresh.fused_optimizer.load_state_dict(states)
    for model in (trained, fresh):
        train(model, scenario, range(3, 4))
    assert_rows(rows(trained.module.sparse), rows(fresh.module.sparse))
    name = "sparse.embedding_bags.t1.ids"
    index = state[name].tolist()
    assert index == list(range(rank, 31, world_size)), "an index table has all of its rows"
    state[name] = state[name] + 1  # names ids that another rank owns
    with pytest.raises(ValueError, match="does not own"):
        fresh.module.sparse.load_state_dict({key.removeprefix("sparse."): v for key, v in state.items() if "t" in key})
    with pytest.raises(RuntimeError, match="does not own"):
        fresh.module.load_state_dict(state)
    weight = torch.arange(31 * 4.0).reshape(31, 4)
    state[name.replace("ids", "weight")] = weight
    del state[name]  # without ids, the weight has all rows of the table, as in TorchRec's state dicts
    fresh.module.load_state_dict(state)
    found = fresh.module.state_dict()
    assert found[name].tolist() == index
    assert torch.equal(found[name.replace("ids", "weight")], weight[rank::world_size])


def trained_before(rank: int, world_size: int, steps: int) -> Any:
    """Trains `steps` of four steps unsharded on all ranks' batches, then shards the model and trains the rest.

    Returns the rows of this rank.

    """
    scenario = Scenario(optimizer=ADAM, seed=21)
    model = Model(scenario, 3)
    for step in range(steps):
        model(concatenated(bags_of(scenario, step, 2)))[0].div(2).backward()
    if steps < 4:
        model = train(shard(model, scenario), scenario, range(steps, 4)).module
    return rows(model.sparse)


def test_rows_created_before_sharding_are_kept(ranks_of: Start) -> None:
    assert_rows(united(ranks_of(2).run(trained_before, 2)), trained_before(0, 1, 4), 1e-5, 2e-6)


@on_ranks(2)
def test_fused_and_combined_optimizer() -> None:
    model: Any = shard(Model(Scenario(optimizer=ADAGRAD), 0), PLAIN)
    dense = KeyedOptimizerWrapper({"scale": model.module.scale}, lambda params: torch.optim.SGD(params, lr=0.1))
    both = CombinedOptimizer([model.fused_optimizer, dense])
    assert set(both.params) >= {"sparse.embedding_bags.t0.weight", "scale"}
    both.zero_grad()
    train(model, PLAIN, range(1))
    both.step()
    assert both.state_dict()["state"]["sparse.embedding_bags.t0.weight"]["t0.step"] == 1
    model.fused_optimizer.param_groups[0]["lr"] = 0.0
    before = rows(model.module.sparse)
    after = rows(train(model, PLAIN, range(1)).module.sparse)
    assert all(torch.equal(after["t0"][i][:4], row[:4]) for i, row in before["t0"].items())


# ---- exchanged bytes


BATCH = {"f0": [[1, 1, 3]], "f1": [[1, 2, -1]], "f2": [[5, 5]], "f3": [[]]}


@on_ranks(2)
def test_bytes_exchanged(rank: int) -> None:
    """`BATCH` has 11 lookups of 7 distinct rows; rank 0 owns only id 2.

    Table t0 has ids 1, 3, 2 and -1 in 6 lookups, t1 has id 5 in 2, and t2 has ids 1 and 3 in 3.
    """
    model, of_others, duplicates = sharded(PLAIN, 0), [6, 1][rank], [10, 1][rank]
    model(jagged(BATCH))[0].backward()
    stats = model.module.sparse.exchange_stats()
    assert (stats["lookups"], stats["unique_ids"]) == (11, 7)
    sizes = [stats[name] for name in ("id_bytes", "row_bytes", "grad_bytes")]
    assert sizes == [of_others * 8, of_others * 16, of_others * 16]
    assert stats["bytes_with_duplicates"] == duplicates * (8 + 16 + 16)


class Scalars:
    def __init__(self) -> None:
        self.tags: list[str] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.tags.append(tag)


@on_ranks(2)
def test_each_rank_reports_its_own_tables(rank: int) -> None:
    model, writer = sharded(PLAIN, 0), Scalars()
    tables = model.module.sparse
    log = rst.CacheLog(writer, model.module, every=1)
    model(jagged(BATCH))[0].backward()
    log.remove()
    of_t0 = [1, 3][rank]  # rank 0 owns id 2; rank 1 owns 1, 3 and -1
    assert f"rank {rank} on {Place.device}" in tables._repr_html_()
    assert f"<th>t0</th><td>{of_t0}</td>" in tables._repr_html_()
    assert tables.cache_stats("t0")["new_rows"] == of_t0
    assert tables.memory_report()["device"] == 16 * sum(tables.cache_sizes.values())
    assert {"sparse/t0/hit_rate", "sparse/wait_us", "sparse/device_bytes"} <= set(writer.tags)
    tables.reset_cache_stats()
    assert tables.cache_stats()["lookups"] == 0
    assert repr(tables).count("ShardHandle(on this rank ") == 3


# ---- pipelines


def pipelined(scenario: Scenario, seed: int, make: Callable[[Any, Any], Any]) -> tuple[list[Any], Any, set[int]]:
    """Trains a model in a pipeline; returns its outputs, its rows, and the set of numbers of batches planned ahead."""
    model = sharded(scenario, seed)
    tables, pipeline = model.module.sparse, make(model, torch.optim.SGD([model.module.scale], lr=0.05))
    batches, outputs, planned = batches_of(scenario, scenario.steps), [], set()
    while True:
        try:
            outputs.append(pipeline.progress(batches))
        except StopIteration:
            return outputs, rows(tables), planned
        tables.wait_for_plans()
        planned.add(tables.cache_stats()["batches"] - len(outputs))


@on_ranks(2)
@pytest.mark.parametrize(("kind", "hybrid"), [("bags", False), ("sequences", False), ("bags", True), ("hash", True)])
def test_own_pipelines_have_the_bits_of_any_depth(rank: int, kind: str, hybrid: bool) -> None:
    ids = 60 if kind == "hash" else 300  # hash tables have a capacity of 100
    scenario = Scenario(kind, optimizer=ADAGRAD, cache=60, ids=ids, sizes=((2, 1),), steps=8, seed=23)

    def ours(depth: int) -> Callable[[Any, Any], Any]:
        return lambda model, dense: rst.EmbCacheTrainPipelineSparseDist(model, dense, "cpu", Place.device, depth=depth)

    def hybrids(model: Any, dense: Any) -> Any:
        return rst.HybridTrainPipelineSparseDist(model, dense, Place.device, pipe_n_batch=3)

    plain, ahead = (pipelined(scenario, 3 + rank, make) for make in (ours(0), hybrids if hybrid else ours(3)))
    assert len(ahead[0]) == 8
    assert_same(ahead[:2], plain[:2])
    assert plain[2] == {0}
    assert max(ahead[2]) >= 1, "batches are planned ahead"


@on_ranks(2)
def test_a_compiled_pipeline() -> None:
    """A lookup of the tables is a graph break."""
    scenario = Scenario(optimizer=ADAGRAD, seed=26)

    def compiled(on: int) -> Callable[[Any, Any], Any]:
        how = TorchCompileConfig(compile_on_iter=on, backend="eager")
        return lambda model, dense: TrainPipelinePT2(model, dense, Place.device, how)

    with pytest.raises(RuntimeError, match=r"torch\.jit\.script.*export the dense part"):
        torch.jit.script(sharded(scenario))
    with torch._dynamo.config.patch():  # restores torch._dynamo's config, which the pipeline changes
        plain, found = (pipelined(scenario, 3, compiled(on)) for on in (scenario.steps, 1))
    torch._dynamo.reset()
    assert_same(found[:2], plain[:2])


def stock_pipeline(rank: int, world_size: int, scenario: Scenario) -> Any:
    return pipelined(scenario, 3 + rank, lambda model, dense: TrainPipelineSparseDist(model, dense, Place.device))


@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_stock_pipeline(ranks_of: Start, kind: str) -> None:
    scenario = Scenario(kind, optimizer=ADAGRAD, steps=6, seed=22)
    results = ranks_of(2).run(stock_pipeline, scenario)
    assert [len(result[0]) for result in results] == [6, 6]
    _, expected, _ = train_alone(scenario, 2)
    assert_rows(united([result[1] for result in results]), expected, 1e-5, 2e-6)
