"""Builds tables with update="step", their batches, and a model with them and a dense layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from batches import jagged, random_bags
from collection_factory import apply, bag_config, bags_collection
from torchrec.optim import CombinedOptimizer, KeyedOptimizerWrapper
from training import differing_tensors, read, rows_of

KEYS = ("f0", "f1", "f2")


def tables(device: torch.device, update: str = "step", optimizer: type = torch.optim.SGD, **options: Any) -> Any:
    """Builds three tables in two groups, whose first rows exist."""
    dims = (4, 8, 4)
    configs = [bag_config(f"t{i}", [key], embedding_dim=dims[i]) for i, key in enumerate(KEYS)]
    keywords = {name: options.pop(name) for name in ("update", "cache", "check_finite") if name in options}
    collection = apply(
        bags_collection(device, *configs, **{"update": update, "cache": 40, **keywords}), optimizer, **options
    )
    return collection


def batches(count: int, seed: int = 0, ids: int = 30) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [jagged(random_bags(rng, KEYS, ids)) for _ in range(count)]


def loss_of(collection: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = collection(batch).values().pow(2).sum()
    return loss


def step(collection: Any, batch: Any) -> None:
    """Runs a backward pass and an optimizer step."""
    loss_of(collection, batch).backward()
    collection.fused_optimizer.step()


def step_of(collection: Any) -> int:
    """Returns the first table's number of updates."""
    return int(collection.fused_optimizer.state_dict()["state"]["embedding_bags.t0.weight"]["t0.step"])


def assert_same(one: Any, other: Any) -> None:
    """Checks that rows, states and step counts are bit-identical."""
    assert not list(differing_tensors(one.state_dict(), other.state_dict()))
    assert not list(differing_tensors(one.fused_optimizer.state_dict(), other.fused_optimizer.state_dict()))


def handles(collection: Any) -> dict[str, Any]:
    return {name.split(".")[-2]: parameter for name, parameter in collection.named_parameters()}


class Both(torch.nn.Module):
    """A model with tables and a dense layer; with `plain`, torch's embeddings with the same rows replace the tables."""

    def __init__(self, device: torch.device, plain: bool) -> None:
        super().__init__()
        self.tables = tables(device, "step", torch.optim.SGD, lr=0.3)
        read(self.tables, batches(1)[0])
        torch.manual_seed(5)
        self.dense = torch.nn.Linear(16, 2).to(device)
        self.bags = None
        if plain:
            self.bags = torch.nn.ModuleList()
            for i, key in enumerate(KEYS):
                every = jagged({other: [[row] if other == key else [] for row in range(30)] for other in KEYS})
                values = read(self.tables, every).split([4, 8, 4], dim=1)[i]
                bag = torch.nn.EmbeddingBag.from_pretrained(values, freeze=False, mode="sum").to(device)
                self.bags.append(bag)
            del self.tables

    def forward(self, batch: Any) -> torch.Tensor:
        if self.bags is None:
            values = self.tables(batch).values()
        else:
            device = self.dense.weight.device
            values = torch.cat(
                [
                    bag(batch[key].values().to(device), batch[key].offsets()[:-1].to(device))
                    for bag, key in zip(self.bags, KEYS, strict=True)
                ],
                dim=1,
            )
        return (self.dense(values) * torch.tensor([10.0, -7.0], device=values.device)).pow(2).sum()

    def optimizer(self, lr: float = 0.3) -> Any:
        """Builds SGD for all parameters of the model."""
        if self.bags is None:
            named = dict(self.dense.named_parameters())
            dense = KeyedOptimizerWrapper(named, lambda parameters: torch.optim.SGD(parameters, lr=lr))
            return CombinedOptimizer([("tables", self.tables.fused_optimizer), ("dense", dense)])
        named = dict(self.named_parameters())
        return KeyedOptimizerWrapper(named, lambda parameters: torch.optim.SGD(parameters, lr=lr))

    def rows(self, key: int) -> torch.Tensor:
        """Returns the rows of the ids below 30."""
        if self.bags is not None:
            return self.bags[key].weight.detach().cpu()
        known = rows_of(self.tables, f"t{key}")
        every = jagged({other: [[i] if other == KEYS[key] else [] for i in range(30)] for other in KEYS})
        values = read(self.tables, every).split([4, 8, 4], dim=1)[key]
        assert known
        return values
