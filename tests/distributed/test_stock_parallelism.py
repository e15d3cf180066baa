"""TorchRec's pipelines, 2D environments and resharding, over tables that this package has sharded."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jagged import jagged
from ranks import Place, Ranks
from sharded_model import Model, Scenario, bags_of, optimizer_of, rows, shard
from torch.distributed.device_mesh import DeviceMesh
from torchrec.distributed.train_pipeline import train_pipelines as pipelines
from torchrec.distributed.types import ShardingEnv2D
from torchrec.streamable import Pipelineable

import rec_sdk_torch as rst

Start = Callable[[int], Ranks]
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
"""The table of docs/torch.md."""


class Sample(Pipelineable):
    def __init__(self, ids: Any) -> None:
        self.ids = ids

    def to(self, device: torch.device, non_blocking: bool = False) -> Sample:
        return Sample(self.ids.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: Any) -> None:
        """Its tensors are on the host."""


class OfSamples(Model):
    def forward(self, batch: Any) -> Any:
        return super().forward(batch.ids)


def trained(rank: int, world_size: int, name: str | None) -> Any:
    """Rows and the dense parameter behind a pipeline, or behind a plain loop."""
    torch.manual_seed(0)
    model = shard(OfSamples(SCENARIO, 3, cache=1000), SCENARIO, world_size)
    optimizer = optimizer_of(model.module, lr=0.05)
    batches = iter([Sample(jagged(*bags_of(SCENARIO, step, world_size)[rank])) for step in range(SCENARIO.steps)])
    if name is None:
        for batch in batches:
            optimizer.zero_grad()
            model(batch)[0].backward()
            optimizer.step()
        return rows(model.module.sparse), model.module.scale.detach().clone()
    options = {}
    if name == "TrainPipelinePT2":
        options["compile_configs"] = pipelines.TorchCompileConfig(backend="eager")
    try:
        pipeline = getattr(pipelines, name)(model, optimizer, Place.device, **options)
        while True:
            pipeline.progress(batches)
    except StopIteration:
        return rows(model.module.sparse), model.module.scale.detach().clone()
    except AssertionError as error:
        return str(error)


@pytest.mark.parametrize("name", ON_HOSTS)
def test_a_stock_pipeline_over_sharded_tables(ranks_of: Start, device: torch.device, name: str) -> None:
    if device.type != "cpu":
        pytest.skip("TorchRec's pipelines ask for CUDA")
    found = ranks_of(2).run(trained, name)
    if ON_HOSTS[name] is not SAME:
        assert all(ON_HOSTS[name] in text for text in found)
        return
    for (tables, dense), (expected, expected_dense) in zip(found, ranks_of(2).run(trained, None), strict=True):
        assert torch.equal(dense, expected_dense)
        for table, of_table in expected.items():
            assert all(torch.equal(tables[table][i], row) for i, row in of_table.items())


def refused(rank: int, world_size: int) -> tuple[str, str]:
    """The errors of a 2D environment of two groups, and of resharding."""
    alone = [torch.distributed.new_group([each]) for each in range(world_size)][rank]
    world = torch.distributed.group.WORLD
    mesh = DeviceMesh("cpu", [[each] for each in range(world_size)])
    model = Model(SCENARIO, 3)
    sharders = {each.module_type: each for each in rst.get_default_hybrid_sharders(None)}
    sharder = sharders[type(model.sparse)]
    with pytest.raises(ValueError, match="sharding_group_size") as of_groups:
        sharder.shard(model.sparse, {}, ShardingEnv2D(alone, world, world, mesh), Place.device)
    sharded = shard(model, SCENARIO, world_size)
    with pytest.raises(NotImplementedError, match="stay where their plan has put them") as of_reshard:
        sharded.reshard({"sparse": (0.0, SimpleNamespace())}, "sparse")
    return str(of_groups.value), str(of_reshard.value)


def test_groups_of_ranks_and_other_plans_are_refused(ranks_of: Start) -> None:
    for groups, reshard in ranks_of(2).run(refused):
        assert "sharding_group_size is 1 of 2 ranks" in groups
        assert "['t0', 't1', 't2']" in reshard
