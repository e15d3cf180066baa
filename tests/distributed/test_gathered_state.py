"""TorchRec's tools that gather the state dict of a sharded model, as its two-tower example does before it serves."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from jagged import jagged
from ranks import Ranks
from sharded_model import FEATURES, KEYS, Model, Scenario, rows, shard
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.inference import state_dict_transform

import rec_sdk_torch as rst
from rec_sdk_torch.patches import gathering

Start = Callable[[int], Ranks]
SHARDINGS = [("row_wise",) * 3, ("table_wise", "row_wise", "data_parallel"), ("data_parallel",) * 3]
T1 = "sparse.embedding_bags.t1"
BF16 = Scenario(kind="bags").dtype.__class__.BF16


class Plain(torch.nn.Module):
    """The model of the tests with tables of TorchRec's, which is not sharded."""

    def __init__(self, device: str, rows: int = 40, dim: int = 4) -> None:
        super().__init__()
        sizes = (rows, 31, rows)
        configs = [
            EmbeddingBagConfig(name=f"t{i}", num_embeddings=size, embedding_dim=dim, feature_names=names)
            for i, (size, names) in enumerate(zip(sizes, FEATURES, strict=True))
        ]
        self.sparse = EmbeddingBagCollection(configs, device=torch.device(device))
        self.scale = torch.nn.Parameter(torch.empty(1, device=device))


def trained(rank: int, world_size: int, scenario: Scenario, least: int) -> Any:
    """A model that has met some of the ids from `least` to 30."""
    model = shard(Model(scenario, seed=3), scenario, world_size)
    for step in range(3):
        random = torch.Generator().manual_seed(10 * step + rank)
        bags = {key: torch.randint(0 if key == "f2" else least, 31, (3, 2), generator=random).tolist() for key in KEYS}
        model(jagged(bags))[0].backward()
    return model


def gathered(rank: int, world_size: int, scenario: Scenario, ours: bool) -> Any:
    """(rows of this rank, weights and a dense parameter of the gathered model on rank 0, the parameter of this one)."""
    model = trained(rank, world_size, scenario, 0)
    group = torch.distributed.new_group(backend="gloo")
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
    found = target.state_dict() if rank == 0 else None
    return rows(model.module.sparse), found, model.module.scale.detach().cpu()


@pytest.mark.parametrize(
    ("sharding", "ours"), zip(SHARDINGS, (False, True, False), strict=True), ids=["rows", "mixed", "replicas"]
)
def test_rows_of_all_ranks(ranks_of: Start, sharding: tuple[str, ...], ours: bool) -> None:
    scenario = Scenario(sharding=sharding, optimizer=torch.optim.SGD, dtype=BF16 if ours else Scenario().dtype)
    results = ranks_of(2).run(gathered, scenario, ours)
    state = results[0][1]
    assert torch.equal(state["scale"], results[0][2])
    for table in ("t0", "t1", "t2"):
        weight = state[f"sparse.embedding_bags.{table}.weight"]
        expected = {i: row for of_rank, _, _ in results for i, row in of_rank[table].items()}
        assert len(expected) == 31 if table == "t1" else 10 < len(expected) < 31
        for i, row in enumerate(weight):
            assert torch.equal(row, expected.get(i, torch.zeros(4)).float()), (table, i)


def refused(rank: int, world_size: int, least: int, rows_of_target: int, dim: int) -> tuple[str, bool]:
    """The error, and whether the target of rank 0 is as it was."""
    model = trained(rank, world_size, Scenario(optimizer=torch.optim.SGD), least)
    target = Plain("cpu" if rank == 0 else "meta", rows_of_target, dim)
    before = {key: value.clone() for key, value in target.state_dict().items()}
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the text is returned
        rst.state_dict_gather(model.state_dict(), target.state_dict())
    same = rank > 0 or all(
        torch.equal(value, before[key]) for key, value in target.state_dict().items() if key != "scale"
    )
    return str(caught.value), same


@pytest.mark.parametrize(
    ("least", "rows_of_target", "dim", "message"),
    [
        (-15, 40, 4, "ids (such as -"),
        (0, 20, 4, "are no rows of the target, which has 20"),
        (0, 40, 8, "t0.weight: the target is (40, 8), rows have 4 elements"),
    ],
)
def test_rows_without_a_place(ranks_of: Start, least: int, rows_of_target: int, dim: int, message: str) -> None:
    for text, same in ranks_of(2).run(refused, least, rows_of_target, dim):
        assert message in text
        assert same


def test_tables_of_one_process() -> None:
    scenario = dataclasses.replace(Scenario(), cache=60)
    model, twin, target = Model(scenario, 3), Model(scenario, 4), Plain("cpu")
    for step in range(3):
        random = torch.Generator().manual_seed(step)
        model(jagged({key: torch.randint(0, 31, (3, 2), generator=random).tolist() for key in KEYS}))[0].backward()
    with pytest.raises(ValueError, match="the target has tables of this package, whose rows a Saver brings over"):
        state_dict_transform.state_dict_gather(model.state_dict(), twin.state_dict())
    with pytest.warns(UserWarning, match="rows are zeros: the table has not met these ids"):
        state_dict_transform.state_dict_gather(model.state_dict(), target.state_dict())
    for table, expected in rows(model.sparse).items():
        weight = target.state_dict()[f"sparse.embedding_bags.{table}.weight"]
        assert all(torch.equal(weight[i], row[:4]) for i, row in expected.items())


def test_the_older_module_gathers_too() -> None:
    legacy = pytest.importorskip("torchrec.inference.inference_legacy.state_dict_transform")
    model, target = Model(Scenario(cache=60), 3), Plain("cpu")
    with pytest.warns(UserWarning, match="rows are zeros"):
        legacy.state_dict_gather(model.state_dict(), target.state_dict())
    assert torch.equal(target.state_dict()[f"{T1}.weight"], model.state_dict()[f"{T1}.weight"])


def test_scripts_may_import_the_name_first() -> None:
    path = state_dict_transform.__file__
    assert path is not None
    spec = importlib.util.spec_from_file_location("state_dict_transform_of_a_script", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    gather = module.state_dict_gather
    gathering._gather_by_ids(module)  # as `import rec_sdk_torch` does
    whole = {"t.weight": torch.empty(3, 1), "x": torch.empty(2)}
    weight = torch.tensor([[2.0], [0.0], [1.0]])
    gather({"t.ids": torch.tensor([2, 0, 1]), "t.weight": weight, "x": torch.ones(2)}, whole)
    assert whole["t.weight"].flatten().tolist() == [0.0, 1.0, 2.0]
    assert whole["x"].tolist() == [1.0, 1.0]


def test_rows_of_torchrecs_collection_are_those_of_the_ids() -> None:
    """It takes rows as they come: row i is that of the id i."""
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
