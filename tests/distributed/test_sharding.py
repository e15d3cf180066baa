"""Plans, state dicts, bytes exchanged, pipelines and errors of sharded collections."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jagged import bag_config, bags_collection, jagged
from ranks import Place, Ranks
from sharded_model import Model, Scenario, bags_of, concatenated, rows, shard, train_alone
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.train_pipeline import TrainPipelinePT2, TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.train_pipelines import TorchCompileConfig
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingEnv
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

import rec_sdk_torch as rst
from rec_sdk_torch.runtime.host_groups import host_group

Start = Callable[[int], Ranks]


def plan_of(kind: str, ranks: list[int] | None = None, tables: tuple[str, ...] = ("t0",)) -> Any:
    fused = EmbeddingComputeKernel.FUSED.value
    return EmbeddingModuleShardingPlan({table: ParameterSharding(kind, fused, ranks) for table in tables})


def world() -> ShardingEnv:
    return ShardingEnv.from_process_group(torch.distributed.group.WORLD)


# ---- what is refused


def refused_plans(rank: int, world_size: int) -> None:
    sharder = rst.EmbCacheEmbeddingBagCollectionSharder()
    for plan, message in (
        (plan_of("column_wise", [0]), "'t0': sharding type 'column_wise'.*'row_wise', 'table_wise'"),
        (plan_of("table_wise", [world_size]), "'t0': table_wise on ranks"),
        (plan_of("table_wise", [0, 1]), "'t0': table_wise on ranks"),
        (plan_of("row_wise", tables=()), "lacks tables \\['t0'\\]"),
        (plan_of("row_wise", tables=("t0", "t9")), "unknown ones \\['t9'\\]"),
    ):
        with pytest.raises(ValueError, match=message):
            sharder.shard(bags_collection(Place.device), plan, world(), Place.device)
    planner = EmbeddingShardingPlanner(
        Topology(world_size, "cpu"), constraints={"t0": ParameterConstraints(sharding_types=["column_wise"])}
    )
    with pytest.raises(RuntimeError, match=r"No available sharding type.* for t0"):
        planner.plan(Model(Scenario(), 0), rst.get_default_hybrid_sharders(world()))


def test_wrong_plans_are_refused(ranks_of: Start) -> None:
    ranks_of(2).run(refused_plans)


def exchange_of(host: Any, model: Any) -> Any:
    cpu_env: Any = None if host is None else SimpleNamespace(process_group=host)  # a ShardingEnv makes more groups
    sharder = rst.EmbCacheEmbeddingBagCollectionSharder(cpu_env=cpu_env)
    return sharder.shard(bags_collection(Place.device), plan_of("row_wise"), model, Place.device).exchange


def groups_of_ids(rank: int, world_size: int) -> None:
    """Ids have a gloo group of the model's ranks and timeout, unless one is given; all collections share it.

    A model over a gloo group of some ranks uses that.
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


def test_groups_of_ids(ranks_of: Start) -> None:
    ranks_of(2).run(groups_of_ids)


def test_no_process_group() -> None:
    with pytest.raises(ValueError, match="a process group is needed"):
        rst.EmbCacheEmbeddingBagCollectionSharder().shard(
            bags_collection(torch.device("cpu")), plan_of("row_wise"), ShardingEnv.from_local(2, 0)
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


def bad_batches(rank: int, world_size: int) -> list[str]:
    model = shard(Model(Scenario(cache=8), 0), Scenario(), world_size)
    good, seen = jagged({key: [[1], [2]] for key in ("f0", "f1", "f2", "f3")}), []
    lacking = jagged({"f0": [[1]]})
    many = jagged({key: [list(range(0, 200, 2))] for key in ("f0", "f1", "f2", "f3")})
    for bad in (lacking, many):  # of rank 1; the second is too much for the cache of rank 0
        try:
            model(good if rank == 0 else bad)[0].backward()
        except Exception as error:
            seen.append(f"{type(error).__name__}: {error}")
        model(good)[0].backward()
    return seen


def test_a_batch_that_fails_fails_on_all_ranks(ranks_of: Start) -> None:
    first, second = ranks_of(2).run(bad_batches)
    assert first == second
    assert "lacks features" in first[0]
    assert first[1].startswith("CacheTooSmallError")


def idle_ids(rank: int, world_size: int) -> tuple[int, int, int]:
    model = Model(Scenario(), 0)
    rules = rst.AdmitAndEvictConfig(evict_idle_steps=2)
    model.sparse = rst.EmbCacheEmbeddingBagCollection(
        [bag_config("t0", ["f0"], admit_and_evict_config=rules)], cache=20, device=Place.device
    )
    rst.apply_optimizer_in_backward(torch.optim.SGD, model.sparse.parameters(), {"lr": 0.1})
    model = shard(model, Scenario(sharding=("row_wise",)), world_size)
    sparse = model.module.sparse
    dense = torch.optim.SGD([model.module.scale], lr=0.05)
    pipeline: Any = rst.EmbCacheTrainPipelineSparseDist(model, dense, "cpu", Place.device, evict_step_interval=3)
    batches = iter([jagged({"f0": [[number, 100 + number]]}) for number in (1, 2, 3, 3)])
    left = []
    for _ in range(4):
        pipeline.progress(batches)
        left.append(sparse.cache_stats()["evicted"])
    return left[1], left[3], sparse.evict("t0")


def test_idle_ids_leave_their_homes(ranks_of: Start) -> None:
    results = ranks_of(2).run(idle_ids)
    assert [result[0] for result in results] == [0, 0], "the interval is three steps"
    assert sum(result[1] for result in results) == 2, "1 and 101, after the third"
    assert sum(result[2] for result in results) == 2, "2 and 102, when asked for"


# ---- devices


def devices(rank: int, world_size: int) -> None:
    sharder = rst.EmbCacheEmbeddingBagCollectionSharder()
    plan, meta = plan_of("row_wise"), torch.device("meta")
    assert sharder.shard(bags_collection(meta), plan, world()).device == torch.device("cpu"), "TorchRec's default"
    assert sharder.shard(bags_collection(meta), plan, world(), Place.device).device == Place.device
    assert sharder.shard(bags_collection(Place.device), plan, world()).device == Place.device
    if Place.device.type != "cpu":
        with pytest.warns(UserWarning, match=rf"'t0'.* are on {Place.device}, .* onto cpu.*device='{Place.device}'"):
            sharder.shard(bags_collection(Place.device), plan, world(), torch.device("cpu"))


def test_where_shards_are(ranks_of: Start) -> None:
    """On the device that DistributedModelParallel gives, which is the host unless it is given one."""
    ranks_of(2).run(devices)


def under_a_default_device(rank: int, world_size: int, scenario: Scenario, default: str) -> Any:
    batches = [jagged(*bags_of(scenario, step, world_size)[rank]) for step in range(scenario.steps)]
    outputs = []
    with torch.device(default or Place.device):
        model = shard(Model(scenario, 3), scenario, world_size)
        for batch in batches:
            loss, output = model(batch)
            loss.backward()
            outputs.append(output)
        model.eval()
        outputs.append(model(batches[0])[1])
        found = rows(model.module.sparse)
    return outputs, found


def test_a_default_device_changes_nothing(ranks_of: Start, device: torch.device) -> None:
    default = "meta" if device.type == "cpu" else "cpu"
    for scenario in (
        Scenario(weighted=True, optimizer=torch.optim.Adam, dims=(4, 8, 4), cache=40, seed=24),
        Scenario(kind="sequences", admit=2, seed=25),
    ):
        plain, other = (ranks_of(2).run(under_a_default_device, scenario, which) for which in ("", default))
        for one, two in zip(plain, other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one[0], two[0], strict=True))
            for table, expected in one[1].items():
                assert two[1][table].keys() == expected.keys()
                assert all(torch.equal(row, two[1][table][i]) for i, row in expected.items())


# ---- initial weights


def made_towers(seed: int, device: torch.device) -> list[Any]:
    """Two collections with one table name, without a seed of their own."""
    config = bag_config(initializer_type=rst.InitializerType.UNIFORM)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return [bags_collection(device, config, seed=None) for _ in range(2)]


def towers(rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    sharder = rst.EmbCacheEmbeddingBagCollectionSharder()
    made = made_towers(seed + rank, Place.device)
    sharded = [sharder.shard(each, plan_of("row_wise"), world(), Place.device).eval() for each in made]
    return [each(jagged({"f0": [[1], [4], [7]]})).values().cpu() for each in sharded]


def test_towers_start_apart_and_as_in_one_process(ranks_of: Start) -> None:
    """Where ranks have seeds of their own, that of rank 0 holds for each collection."""
    expected = [each.eval()(jagged({"f0": [[1], [4], [7]]})).values() for each in made_towers(6, torch.device("cpu"))]
    assert not torch.equal(*expected)
    for found in ranks_of(2).run(towers, 6):
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


# ---- no plan


def without_plan(rank: int, world_size: int, ours: bool) -> Any:
    """As a script that leaves it to DistributedModelParallel."""
    scenario = Scenario()
    options = {"sharders": rst.get_default_hybrid_sharders()} if ours else {}
    model = DistributedModelParallel(Model(scenario, 3), device=Place.device, **options)
    for step in range(2):
        model(jagged(*bags_of(scenario, step, world_size)[rank]))[0].backward()
    return type(model.module.sparse).__name__, model.module.sparse.device.type


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.filterwarnings("ignore:DistributedDataParallel averages")
def test_no_plan(ranks_of: Start, device: torch.device, ours: bool) -> None:
    """Without our sharders, tables are each rank's own."""
    expected = "ShardedCollection" if ours else "EmbCacheEmbeddingBagCollection"
    assert ranks_of(2).run(without_plan, ours) == [(expected, device.type)] * 2


def test_npus_are_planned_by_host_memory() -> None:
    """That is where the rows are."""
    npus, hosts = (Topology(2, kind, hbm_cap=1, ddr_cap=2**40) for kind in ("npu", "cpu"))
    assert [device.storage for device in npus.devices] == [device.storage for device in hosts.devices]
    assert Topology(world_size=2, compute_device="npu").compute_device == "cpu"
    assert Topology(2, "cuda", hbm_cap=5).devices[0].storage.hbm == 5
    with pytest.raises(AssertionError, match="unsupported compute device tpu"):
        Topology(2, "tpu")


# ---- state


def save_and_load(rank: int, world_size: int, scenario: Scenario, inside: bool) -> None:
    trained = shard(Model(scenario, 3), scenario, world_size)
    for step in range(3):
        trained(jagged(*bags_of(scenario, step, world_size)[rank]))[0].backward()
    state, states = trained.state_dict(), trained.fused_optimizer.state_dict()
    fresh = shard(Model(scenario, 3), scenario, world_size)  # the seed of ids that are yet to come
    fresh(jagged(*bags_of(scenario, 7, world_size)[rank]))[0].backward()
    loading = fresh.module if inside else fresh
    result = loading.load_state_dict({**{n: v.clone() for n, v in state.items()}, "sparse.x": 0}, strict=False)
    assert result == ([], ["sparse.x" if inside else "x"]), "DistributedModelParallel leaves the prefix out"
    fresh.fused_optimizer.load_state_dict(states)
    for model in (trained, fresh):
        model(jagged(*bags_of(scenario, 3, world_size)[rank]))[0].backward()
    mine, its = rows(trained.module.sparse), rows(fresh.module.sparse)
    for table, found in mine.items():
        assert found.keys() == its[table].keys()
        for i, row in found.items():
            both = min(len(row), len(its[table][i]))  # states of rows that were not looked up are kept, or not
            assert torch.equal(row[:both], its[table][i][:both]), (table, i)
            assert not its[table][i][both:].any()
    name = "sparse.embedding_bags.t1.ids"
    index = state[name].tolist()
    assert index == list(range(rank, 31, world_size)), "an index table has all of its rows"
    state[name] = state[name] + 1  # another rank's
    with pytest.raises(ValueError, match="not at home on rank"):
        fresh.module.sparse.load_state_dict({key.removeprefix("sparse."): v for key, v in state.items() if "t" in key})
    with pytest.raises(RuntimeError, match="not at home on rank"):
        fresh.module.load_state_dict(state)
    weight = torch.arange(31 * 4.0).reshape(31, 4)
    state[name.replace("ids", "weight")] = weight
    del state[name]  # a whole table's rows, as TorchRec saves them
    fresh.module.load_state_dict(state)
    found = fresh.module.state_dict()
    assert found[name].tolist() == index
    assert torch.equal(found[name.replace("ids", "weight")], weight[rank::world_size])


@pytest.mark.parametrize("inside", [False, True])
def test_state_dict_round_trip(ranks_of: Start, inside: bool) -> None:
    """The state dict is of the wrapped model, and of `module`, the model inside."""
    ranks_of(2).run(save_and_load, Scenario(optimizer=torch.optim.Adam, seed=20), inside)


def trained_before(rank: int, world_size: int, scenario: Scenario) -> Any:
    model = Model(scenario, 3)
    for step in range(2):
        model(concatenated(bags_of(scenario, step, world_size)))[0].div(world_size).backward()
    model = shard(model, scenario, world_size)
    for step in range(2, 4):
        model(jagged(*bags_of(scenario, step, world_size)[rank]))[0].backward()
    return rows(model.module.sparse)


def test_rows_from_before_the_sharding_stay(ranks_of: Start) -> None:
    scenario = Scenario(optimizer=torch.optim.Adam, seed=21)
    alone = Model(scenario, 3)
    for step in range(4):
        alone(concatenated(bags_of(scenario, step, 2)))[0].div(2).backward()
    sharded = ranks_of(2).run(trained_before, scenario)
    for table, expected in rows(alone.sparse).items():
        found = sharded[0][table] | sharded[1][table]
        for i, row in expected.items():
            torch.testing.assert_close(found[i], row[: len(found[i])], rtol=1e-5, atol=2e-6)


def optimizers(rank: int, world_size: int) -> None:
    model = shard(Model(Scenario(optimizer=torch.optim.Adagrad), 0), Scenario(), world_size)
    dense = KeyedOptimizerWrapper({"scale": model.module.scale}, lambda params: torch.optim.SGD(params, lr=0.1))
    both = CombinedOptimizer([model.fused_optimizer, dense])
    assert set(both.params) >= {"sparse.embedding_bags.t0.weight", "scale"}
    both.zero_grad()
    model(jagged(*bags_of(Scenario(), 0, world_size)[rank]))[0].backward()
    both.step()
    assert both.state_dict()["state"]["sparse.embedding_bags.t0.weight"]["t0.step"] == 1
    model.fused_optimizer.param_groups[0]["lr"] = 0.0
    before = rows(model.module.sparse)
    model(jagged(*bags_of(Scenario(), 0, world_size)[rank]))[0].backward()
    after = rows(model.module.sparse)
    assert all(torch.equal(after["t0"][i][:4], row[:4]) for i, row in before["t0"].items())


def test_fused_and_combined_optimizer(ranks_of: Start) -> None:
    ranks_of(2).run(optimizers)


# ---- bytes


def count_bytes(rank: int, world_size: int) -> dict[str, int]:
    model = shard(Model(Scenario(), 0), Scenario(), world_size)
    bags = {"f0": [[1, 1, 3]], "f1": [[1, 2, -1]], "f2": [[5, 5]], "f3": [[]]}
    model(jagged(bags))[0].backward()
    return model.module.sparse.exchange_stats()


def test_bytes_exchanged(ranks_of: Start) -> None:
    first, second = ranks_of(2).run(count_bytes)
    # t0 has f0 and f1: ids 1, 3, 2, -1 of 6 lookups; t1 5 of 2; t2 has f0: 1, 3 of 3. Even ids live on rank 0: only 2.
    assert first["lookups"] == second["lookups"] == 11
    assert first["unique_ids"] == second["unique_ids"] == 7
    assert (first["id_bytes"], first["row_bytes"], first["grad_bytes"]) == (6 * 8, 6 * 16, 6 * 16)
    assert (second["id_bytes"], second["row_bytes"], second["grad_bytes"]) == (8, 16, 16)
    assert first["bytes_with_duplicates"] == 10 * (8 + 16 + 16)
    assert second["bytes_with_duplicates"] == 1 * (8 + 16 + 16)


class Scalars:
    def __init__(self) -> None:
        self.tags: list[str] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.tags.append(tag)


def watch(rank: int, world_size: int) -> dict[str, Any]:
    model = shard(Model(Scenario(), 0), Scenario(), world_size)
    tables, writer = model.module.sparse, Scalars()
    log = rst.CacheLog(writer, model.module, every=1)
    model(jagged({"f0": [[1, 1, 3]], "f1": [[1, 2, -1]], "f2": [[5, 5]], "f3": [[]]}))[0].backward()
    log.remove()
    assert f"rank {rank} on {Place.device}" in tables._repr_html_()
    assert f"<th>t0</th><td>{[1, 3][rank]}</td>" in tables._repr_html_()
    result = {"rows": tables.cache_stats("t0")["new_rows"], "device": tables.memory_report()["device"]}
    tables.reset_cache_stats()
    assert tables.cache_stats()["lookups"] == 0
    assert repr(tables).count("ShardHandle(on this rank ") == 3
    return result | {"sizes": tables.cache_sizes, "tags": writer.tags}


def test_each_rank_reports_its_own_tables(ranks_of: Start) -> None:
    results = ranks_of(2).run(watch)
    assert [result["rows"] for result in results] == [1, 3], "of ids 1, 2, 3 and -1"
    for result in results:
        assert result["device"] == 16 * sum(result["sizes"].values())
        assert {"sparse/t0/hit_rate", "sparse/wait_us", "sparse/device_bytes"} <= set(result["tags"])


# ---- pipelines


def own_pipeline(rank: int, world_size: int, scenario: Scenario, depth: int, hybrid: bool = False) -> Any:
    model = shard(Model(scenario, 3 + rank), scenario, world_size)
    dense = torch.optim.SGD([model.module.scale], lr=0.05)
    pipeline: Any
    if hybrid:
        pipeline = rst.HybridTrainPipelineSparseDist(model, dense, Place.device, pipe_n_batch=depth)
    else:
        pipeline = rst.EmbCacheTrainPipelineSparseDist(model, dense, "cpu", Place.device, depth=depth)
    batches = (jagged(*bags_of(scenario, step, world_size)[rank]) for step in range(scenario.steps))
    planned = set()
    outputs = []
    while True:
        try:
            outputs.append(pipeline.progress(batches))
        except StopIteration:
            break
        model.module.sparse.wait_for_plans()
        planned.add(model.module.sparse.cache_stats()["batches"] - len(outputs))
    return outputs, rows(model.module.sparse), planned


@pytest.mark.parametrize(("kind", "hybrid"), [("bags", False), ("sequences", False), ("bags", True), ("hash", True)])
def test_own_pipelines_have_the_bits_of_any_depth(ranks_of: Start, kind: str, hybrid: bool) -> None:
    ids = 60 if kind == "hash" else 300  # their capacity is 100
    scenario = Scenario(kind=kind, optimizer=torch.optim.Adagrad, cache=60, ids=ids, sizes=((2, 1),), steps=8, seed=23)
    ranks = ranks_of(2)
    plain, ahead = ranks.run(own_pipeline, scenario, 0), ranks.run(own_pipeline, scenario, 3, hybrid)
    for one, other in zip(plain, ahead, strict=True):
        assert len(one[0]) == len(other[0]) == 8
        assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
        for table, found in one[1].items():
            assert found.keys() == other[1][table].keys()
            assert all(torch.equal(row, other[1][table][i]) for i, row in found.items())
        assert one[2] == {0}
        assert max(other[2]) >= 1, "batches are planned ahead"


def stock_pipeline(rank: int, world_size: int, scenario: Scenario) -> Any:
    model = shard(Model(scenario, 3 + rank), scenario, world_size)
    dense = torch.optim.SGD([model.module.scale], lr=0.05)
    pipeline = TrainPipelineSparseDist(model, dense, Place.device)
    batches = (jagged(*bags_of(scenario, step, world_size)[rank]) for step in range(scenario.steps))
    outputs = []
    for _ in itertools.count():
        try:
            outputs.append(pipeline.progress(batches))
        except StopIteration:
            break
    return outputs, rows(model.module.sparse)


def compiled_pipeline(rank: int, world_size: int, scenario: Scenario, compile_on: int) -> Any:
    model = shard(Model(scenario, 3), scenario, world_size)
    with pytest.raises(RuntimeError, match=r"torch\.jit\.script.*export the dense part"):
        torch.jit.script(model)
    dense = torch.optim.SGD([model.module.scale], lr=0.05)
    how = TorchCompileConfig(compile_on_iter=compile_on, backend="eager")
    pipeline = TrainPipelinePT2(model, dense, Place.device, how)
    batches = (jagged(*bags_of(scenario, step, world_size)[rank]) for step in range(scenario.steps))
    with torch._dynamo.config.patch():  # which the pipeline changes
        outputs = [pipeline.progress(batches) for _ in range(scenario.steps)]
    torch._dynamo.reset()
    return outputs, rows(model.module.sparse)


def test_a_compiled_pipeline(ranks_of: Start) -> None:
    """A forward of the tables is a graph break."""
    scenario = Scenario(optimizer=torch.optim.Adagrad, seed=26)
    plain, compiled = (ranks_of(2).run(compiled_pipeline, scenario, on) for on in (scenario.steps, 1))
    for one, other in zip(plain, compiled, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
        for table, expected in one[1].items():
            assert all(torch.equal(row, other[1][table][i]) for i, row in expected.items())


@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_stock_pipeline(ranks_of: Start, kind: str) -> None:
    scenario = Scenario(kind=kind, optimizer=torch.optim.Adagrad, steps=6, seed=22)
    results = ranks_of(2).run(stock_pipeline, scenario)
    assert [len(result[0]) for result in results] == [6, 6]
    _, expected, _ = train_alone(scenario, 2)
    for table in ("t0", "t1", "t2"):
        found = results[0][1][table] | results[1][1][table]
        for i, row in expected[table].items():
            torch.testing.assert_close(found[i], row[: len(found[i])], rtol=1e-5, atol=2e-6)
