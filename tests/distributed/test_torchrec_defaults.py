"""Optimizers of sharded tables have the numbers of TorchRec's sharded tables, which are FBGEMM's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.optim
from jagged import apply, bag_config, bags_collection, jagged, rows_of, train_step
from ranks import Place, on_ranks
from sharded_model import world
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.optim import RowWiseAdagrad

import rec_sdk_torch as rst

KEY = "embedding_bags.t0.weight"
FACTORS = torch.tensor([1.0, -2.0, 3.0, 0.5])


def trained(cls: type, options: dict[str, Any], scale: float = 1.0, ours: bool = True) -> torch.Tensor:
    """How much two steps change the rows of a table whose weights were zeros."""
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
    found, expected = (trained(cls, options, scale, ours) for ours in (True, False))
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=0)
    assert expected[1:4].all()


@on_ranks(1)
def test_a_small_gradient_shows_eps() -> None:
    """FBGEMM's eps is 1e-8: the first step of lr 0.9 at a gradient of 1e-8 is 0.45."""
    found = trained(torch.optim.Adagrad, {"lr": 0.9}, 1e-8)
    assert found[1, 0].item() == pytest.approx(-0.9 / 2 - 0.9 / (1 + 2**0.5))


@on_ranks(1)
def test_weight_decay_of_adam_is_decoupled() -> None:
    """As FBGEMM's ADAM, which `tests/fbgemm` compares with AdamW's formula."""
    options = {"lr": 0.5, "weight_decay": 0.1}
    found = trained(torch.optim.Adam, options)
    assert torch.equal(found, trained(torch.optim.AdamW, options))
    assert not torch.equal(found, trained(torch.optim.Adam, {"lr": 0.5}))


def test_weight_decay_of_adam_is_torchs_without_ranks(device: torch.device) -> None:
    """It joins the gradient: with a gradient of 0, the first step has the length lr in the direction of the weight."""
    collection = bags_collection(device, bag_config(weight_init_min=2.0, weight_init_max=2.0))
    apply(collection, torch.optim.Adam, lr=0.25, weight_decay=0.1)
    train_step(collection, jagged({"f0": [[1]]}), factor=0.0)
    torch.testing.assert_close(rows_of(collection)[1], torch.full((4,), 2.0 - 0.25))


@on_ranks(1)
@pytest.mark.parametrize(("cls", "eps"), [(torch.optim.SGD, {}), (torch.optim.Adagrad, {"eps": 1e-3})])
def test_weight_decay_that_torchrec_drops(cls: Any, eps: dict[str, float]) -> None:
    """A table that is sharded decays as one that is not: by the gradient, where there is none of a loss."""
    options = {"lr": 0.5, "weight_decay": 0.5, **eps}
    decayed, rows = trained(cls, options), torch.nn.Parameter(torch.zeros(8, 4))
    optimizer = cls([rows], **options)
    for _ in range(2):
        rows.grad = torch.zeros(8, 4)
        rows.grad[1:4] = FACTORS
        optimizer.step()
    torch.testing.assert_close(decayed[1:4], rows.detach()[1:4])
    assert not torch.equal(decayed, trained(cls, {"lr": 0.5, **eps}))
