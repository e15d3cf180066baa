"""State dicts of sharded models, passed to TorchRec's gathering functions and torch.distributed.checkpoint.

TorchRec's two-tower example gathers a state dict before it serves the model. torch.distributed.checkpoint assumes that
a plain tensor is the same on all ranks.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from batches import jagged
from ranks import Place, Start, error_of, on_ranks
from sharded_model import FEATURES, KEYS, Model, Scenario, assert_same, rows, sharded, train
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.inference import state_dict_transform
from torchrec.modules.embedding_configs import DataType

import rec_sdk_torch as rst
from rec_sdk_torch.patches import gathering
from rec_sdk_torch.runtime.rank_rows import mark_rank_rows, refuse_rank_rows


class Plain(torch.nn.Module):
    """The model of these tests with TorchRec's unsharded tables."""

    def __init__(self, device: str, rows: int = 40, dim: int = 4) -> None:
        super().__init__()
        sizes = (rows, 31, rows)
        configs = [
            EmbeddingBagConfig(name=f"t{i}", num_embeddings=size, embedding_dim=dim, feature_names=names)
            for i, (size, names) in enumerate(zip(sizes, FEATURES, strict=True))
        ]
        self.sparse = EmbeddingBagCollection(configs, device=torch.device(device))
        self.scale = torch.nn.Parameter(torch.empty(1, device=device))


def bags(step: int, least: int = 0) -> Any:
    """Builds a batch of this rank, with ids from `least` to 30."""
    random = torch.Generator().manual_seed(10 * step + Place.rank)
    return jagged(
        {key: torch.randint(0 if key == "f2" else least, 31, (3, 2), generator=random).tolist() for key in KEYS}
    )


def trained(model: Any, least: int = 0) -> Any:
    for step in range(3):
        model(bags(step, least))[0].backward()
    return model


def gathered(rank: int, world_size: int, scenario: Scenario, ours: bool) -> Any:
    """Trains a model and gathers its state dict on rank 0.

    Returns:
        Rows of this rank; weights and the dense parameter of the gathered model (rank 0 only); this rank's dense
        parameter.
    """
    model = trained(sharded(scenario))
    group = dist.new_group(backend="gloo")
    state = state_dict_transform.state_dict_to_device(model.state_dict(), pg=group, device=torch.device("cpu"))
    target = Plain("meta")
    if rank == 0:
        target = target.to_empty(device="cpu")
        for parameter in target.parameters():
            torch.nn.init.constant_(parameter, float("nan"))
    call = rst.state_dict_gather if ours else state_dict_transform.state_dict_gather
    if rank == 0 and scenario.sharding[0] != "data_parallel":
        with pytest.warns(UserWarning, match=r"t0\.weight: \d+ of 40 rows are zeros"):
            call(state, target.state_dict())
    else:
        call(state, target.state_dict())
    return rows(model.module.sparse), target.state_dict() if rank == 0 else None, model.module.scale.detach().cpu()


@pytest.mark.parametrize(
    ("sharding", "ours"),
    [
        (("row_wise",) * 3, False),
        (("table_wise", "row_wise", "data_parallel"), True),
        (("data_parallel",) * 3, False),
    ],
    ids=["rows", "mixed", "replicas"],
)
def test_rows_of_all_ranks(ranks_of: Start, sharding: tuple[str, ...], ours: bool) -> None:
    scenario = Scenario(sharding=sharding, dtype=DataType.BF16 if ours else DataType.FP32)
    results = ranks_of(2).run(gathered, scenario, ours)
    state = results[0][1]
    assert torch.equal(state["scale"], results[0][2])
    for table in ("t0", "t1", "t2"):
        weight = state[f"sparse.embedding_bags.{table}.weight"]
        expected = {i: row for of_rank, _, _ in results for i, row in of_rank[table].items()}
        assert len(expected) == 31 if table == "t1" else 10 < len(expected) < 31
        for i, row in enumerate(weight):
            assert torch.equal(row, expected.get(i, torch.zeros(4)).float()), (table, i)


@on_ranks(2)
@pytest.mark.parametrize(
    ("least", "rows_of_target", "dim", "message"),
    [
        (-15, 40, 4, "ids (such as -"),
        (0, 20, 4, "are no rows of the target, which has 20"),
        (0, 40, 8, "t0.weight: the target is (40, 8), rows have 4 elements"),
    ],
)
def test_rows_that_do_not_fit_are_refused(rank: int, least: int, rows_of_target: int, dim: int, message: str) -> None:
    model = trained(sharded(Scenario()), least)
    target = Plain("cpu" if rank == 0 else "meta", rows_of_target, dim)
    before = {key: value.clone() for key, value in target.state_dict().items() if key != "scale"}
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the text is checked below
        rst.state_dict_gather(model.state_dict(), target.state_dict())
    assert message in str(caught.value)
    if rank == 0:
        assert_same({key: target.state_dict()[key] for key in before}, before)


def test_tables_of_one_process() -> None:
    scenario = Scenario(cache=60)
    model, twin, target = trained(Model(scenario, 3)), Model(scenario, 4), Plain("cpu")
    with pytest.raises(ValueError, match="the target has tables of this package, whose rows a Saver brings over"):
        state_dict_transform.state_dict_gather(model.state_dict(), twin.state_dict())
    with pytest.warns(UserWarning, match="rows are zeros: no rank has rows for these ids"):
        state_dict_transform.state_dict_gather(model.state_dict(), target.state_dict())
    for table, expected in rows(model.sparse).items():
        weight = target.state_dict()[f"sparse.embedding_bags.{table}.weight"]
        assert all(torch.equal(weight[i], row[:4]) for i, row in expected.items())


def test_the_older_module_gathers_too() -> None:
    legacy = pytest.importorskip("torchrec.inference.inference_legacy.state_dict_transform")
    model, target = Model(Scenario(cache=60), 3), Plain("cpu")
    with pytest.warns(UserWarning, match="rows are zeros"):
        legacy.state_dict_gather(model.state_dict(), target.state_dict())
    name = "sparse.embedding_bags.t1.weight"
    assert torch.equal(target.state_dict()[name], model.state_dict()[name])


def test_scripts_may_import_the_function_first() -> None:
    path = state_dict_transform.__file__
    assert path is not None
    spec = importlib.util.spec_from_file_location("state_dict_transform_of_a_script", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    gather = module.state_dict_gather
    gathering._gather_by_ids(module)  # `import rec_sdk_torch` does the same
    whole = {"t.weight": torch.empty(3, 1), "x": torch.empty(2)}
    weight = torch.tensor([[2.0], [0.0], [1.0]])
    gather({"t.ids": torch.tensor([2, 0, 1]), "t.weight": weight, "x": torch.ones(2)}, whole)
    assert whole["t.weight"].flatten().tolist() == [0.0, 1.0, 2.0]
    assert whole["x"].tolist() == [1.0, 1.0]


def test_rows_in_torchrecs_collection_are_ordered_by_id() -> None:
    """TorchRec's collection expects rows in id order: row i belongs to id i."""
    config = rst.EmbCacheEmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["f"])
    ours = rst.EmbCacheEmbeddingBagCollection([config], cache=8, device="cpu")
    rst.apply_optimizer_in_backward(torch.optim.SGD, ours.parameters(), {"lr": 0.1})
    for i in (5, 0, 7, 2, 6, 1, 4, 3):
        (ours(jagged({"f": [[i]]})).values().sum() * i).backward()
    plain = EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["f"])
    theirs = EmbeddingBagCollection([plain])
    theirs.load_state_dict(ours.state_dict(), strict=False)
    batch = jagged({"f": [[i] for i in range(8)]})
    assert torch.equal(theirs(batch).values(), ours.eval()(batch).values())


# ---- torch.distributed.checkpoint


MIXED = Scenario(sharding=("row_wise", "row_wise", "table_wise"), optimizer=torch.optim.Adagrad)
BF16 = Scenario(sharding=("table_wise", "data_parallel", "row_wise"), dtype=DataType.BF16)
EVEN = Scenario(index_rows=30, ids=30, optimizer=torch.optim.Adagrad)


def full_state(rank: int, world_size: int, scenario: Scenario, offload: bool) -> Any:
    """Returns (rows of this rank, the full state dict); another sharded model that loads it has the same rows."""
    model, fresh = train(sharded(scenario), scenario, range(2)), sharded(scenario, 4)
    state = get_model_state_dict(model.module, options=StateDictOptions(full_state_dict=True, cpu_offload=offload))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=offload)
    set_model_state_dict(fresh.module, dict(state), options=options)
    assert_same(fresh.state_dict(), model.state_dict())
    return rows(model.module.sparse), {key: part.cpu() for key, part in state.items()}


@pytest.mark.parametrize("scenario", [MIXED, BF16], ids=["mixed", "bf16"])
@pytest.mark.parametrize("offload", [False, True])
def test_a_full_state_dict_has_whole_tables(ranks_of: Start, scenario: Scenario, offload: bool) -> None:
    results = ranks_of(2).run(full_state, scenario, offload)
    alone = Model(scenario, seed=5)
    for rank, (_, state) in enumerate(results):
        if offload and rank:
            assert state == {}
            continue
        assert state.keys() == alone.state_dict().keys()
        alone.load_state_dict(state)
        for table, found in rows(alone.sparse).items():
            expected = {i: row for of_rank, _ in results for i, row in of_rank[table].items()}
            assert len(expected) > 10
            assert found.keys() == expected.keys()
            assert all(torch.equal(row[:4], expected[i][:4]) for i, row in found.items()), table


@on_ranks(2)
def test_rows_of_one_rank_are_not_saved_for_all(rank: int, tmp_path: Path) -> None:
    model, path = train(sharded(EVEN), EVEN, range(2)), tmp_path
    state, before = model.state_dict(), rows(model.module.sparse)
    alike = {key: torch.zeros_like(part) for key, part in state.items() if ".t1." in key}
    dcp.save(alike, checkpoint_id=f"{path}/alike")
    given: list[dict[str, Any]] = [
        {"model": model},
        state,
        {"nested": [{key: part.detach() for key, part in state.items()}]},
        {"optimizer": model.module.sparse.fused_optimizer},
    ]
    calls = [functools.partial(dcp.save, each, checkpoint_id=f"{path}/{n}") for n, each in enumerate(given)]
    async_save = functools.partial(dcp.async_save, process_group=dist.new_group(backend="gloo"))
    calls += [functools.partial(async_save, each, checkpoint_id=f"{path}/{n}") for n, each in enumerate(given)]
    writer = dcp.FileSystemWriter(f"{path}/staged")
    calls.append(functools.partial(async_save, {"model": model}, storage_writer=writer))
    calls.append(functools.partial(dcp.load, {key: state[key] for key in alike}, checkpoint_id=f"{path}/alike"))
    assert len(calls) == 10
    for call in calls:
        text = f"have the rows of rank {rank} of 2, and torch.distributed.checkpoint would use one rank's"
        assert text in error_of(call)
    assert not [name for folder, _, names in os.walk(path) for name in names if "alike" not in folder]
    assert_same(rows(model.module.sparse), before)


@on_ranks(2)
def test_keys_may_name_the_rank(rank: int, tmp_path: Path) -> None:
    """The checkpoint is written in the background. It is read into another model's state dict, or into tensors of
    the same sizes.

    """
    source, target = train(sharded(EVEN), EVEN, range(2)), sharded(EVEN, 4)
    saved, group = source.state_dict(), dist.new_group(backend="gloo")
    dcp.async_save({f"rank{rank}": {"model": saved}}, checkpoint_id=tmp_path, process_group=group).result()
    sizes: Any = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    state = {key: part for key, part in target.state_dict().items() if ".t1." in key}
    for key in saved.keys() - state.keys():
        each = sizes[f"rank{rank}.model.{key}"]
        state[key] = torch.empty(each.size, dtype=each.properties.dtype)
    dcp.load({f"rank{rank}": {"model": state}}, checkpoint_id=tmp_path)
    target.load_state_dict(state)
    assert_same(target.state_dict(), saved)


@on_ranks(2)
def test_unsharded_tables_of_each_rank_are_refused(rank: int, tmp_path: Path) -> None:
    model = DistributedDataParallel(Model(EVEN, seed=3))
    assert f"rows of rank {rank} of 2" in error_of(lambda: dcp.save(model.state_dict(), checkpoint_id=tmp_path))


@pytest.mark.parametrize(("key", "fine"), [("rank1.t", True), ("rank10.t", False), ("t1", False), ("a.rank1", True)])
def test_which_keys_name_a_rank(key: str, fine: bool) -> None:
    weight = torch.ones(3, 2)
    mark_rank_rows([weight], 1, 12)
    message = error_of(lambda: refuse_rank_rows({key: weight[1:]}))
    assert bool(message) != fine
    assert message.startswith("" if fine else f"ValueError: key {key!r} and 0 others have the rows of rank 1")
    refuse_rank_rows({key: weight.clone()})
