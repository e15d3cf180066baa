"""DistributedDataParallel around models with tables, and torch's distributed state dicts."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from jagged import apply, bags_collection, same_bits, single_ids, train_step
from spawned import BACKENDS, run_ranks
from torch.distributed.checkpoint import state_dict as dcp
from torch.nn.parallel import DistributedDataParallel

import rec_sdk_torch as rst


class Nested(torch.nn.Module):
    """A collection two levels down, with a dense layer on top."""

    def __init__(self, device: torch.device, optimizer: type = torch.optim.SGD) -> None:
        super().__init__()
        self.sparse = torch.nn.ModuleDict({"inner": bags_collection(device, seed=3)})
        self.dense = torch.nn.Linear(4, 1).to(device)
        torch.nn.init.ones_(self.dense.weight)
        apply(self.sparse["inner"], optimizer)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.dense(self.sparse["inner"](batch).values())


def run_rank(rank: int, device: torch.device, unused: bool) -> None:
    """One of two ranks; each sees its own batch."""
    model = Nested(device)
    inner = model.sparse["inner"]
    with pytest.warns(UserWarning, match="'t0'.*each rank.*DistributedModelParallel"):
        parallel = DistributedDataParallel(model, find_unused_parameters=unused)
    for _ in range(2):
        parallel.zero_grad()
        parallel(single_ids([rank + 1])).sum().backward()
        own = model.dense.weight.grad.flatten()
        gradients = [torch.empty_like(own) for _ in range(2)]
        torch.distributed.all_gather(gradients, own)
        first, second = (gradient.cpu() for gradient in gradients)
        assert torch.equal(first, second), "dense gradients are averaged"
        assert first.any()
    assert inner.table_ids("t0").tolist() == [rank + 1], "tables are of each rank"


@pytest.mark.parametrize("unused", [False, True])
def test_dense_gradients_are_averaged(device: torch.device, tmp_path: Path, unused: bool) -> None:
    run_ranks(run_rank, device, tmp_path, unused)


@pytest.fixture
def alone(device: torch.device) -> Any:
    """A process group of one."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torch.distributed.init_process_group(
        BACKENDS[device.type], init_method=f"tcp://localhost:{port}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_names_given_to_ignore_stay(device: torch.device, alone: None) -> None:
    model = Nested(device)
    model._ddp_params_and_buffers_to_ignore = ["dense.bias"]
    parallel = DistributedDataParallel(model)
    handle = "sparse.inner.embedding_bags.t0.weight"
    assert {"dense.bias", handle} <= parallel.parameters_to_ignore
    assert model._ddp_params_and_buffers_to_ignore == ["dense.bias"]


def test_tables_that_an_optimizer_of_torch_is_to_train_are_refused_at_once(device: torch.device, alone: None) -> None:
    """As a reference is made in scripts for Rec SDK, whose unsharded hash tables are dense parameters."""
    config = rst.HashEmbeddingBagConfig(name="t0", num_embeddings=10, embedding_dim=4, feature_names=["f"])
    model = torch.nn.Sequential(rst.HashEmbeddingBagCollection([config], device=device))
    with pytest.raises(RuntimeError, match=r"\['t0'\].*apply_optimizer_in_backward.*torchrec\.EmbeddingBagC"):
        DistributedDataParallel(model)
    read = torch.nn.Sequential(model[0], torch.nn.Linear(4, 1).to(device)).eval()
    DistributedDataParallel(read)
    apply(model[0], torch.optim.SGD)
    DistributedDataParallel(read.train())


# ---- torch.distributed.checkpoint.state_dict


@pytest.mark.parametrize("full", [False, True])
def test_model_state_dict_round_trip(device: torch.device, full: bool) -> None:
    options = dcp.StateDictOptions(full_state_dict=full)
    trained, fresh = Nested(device), Nested(device)
    train_step(trained.sparse["inner"], single_ids([7, 3]))
    state = dcp.get_model_state_dict(trained, options=options)
    assert not list(same_bits(state, trained.state_dict()))
    dcp.set_model_state_dict(fresh, state, options=options)
    assert not list(same_bits(fresh.state_dict(), trained.state_dict()))


def test_state_dict_with_the_dense_optimizer(device: torch.device) -> None:
    trained, fresh = Nested(device), Nested(device)
    optimizers = [torch.optim.Adam(model.dense.parameters()) for model in (trained, fresh)]
    trained(single_ids([7, 3])).sum().backward()
    optimizers[0].step()
    model_state, state = dcp.get_state_dict(trained, optimizers[0])
    dcp.set_state_dict(fresh, optimizers[1], model_state_dict=model_state, optim_state_dict=state)
    assert not list(same_bits(fresh.state_dict(), trained.state_dict()))
    assert torch.equal(
        optimizers[0].state[trained.dense.weight]["exp_avg"], optimizers[1].state[fresh.dense.weight]["exp_avg"]
    )


def test_model_state_dict_through_ddp(device: torch.device, alone: None) -> None:
    trained, fresh = DistributedDataParallel(Nested(device)), DistributedDataParallel(Nested(device))
    trained(single_ids([7, 3])).sum().backward()
    dcp.set_model_state_dict(fresh, dcp.get_model_state_dict(trained))
    assert not list(same_bits(fresh.state_dict(), trained.state_dict()))
    assert isinstance(fresh.module.sparse["inner"], rst.EmbCacheEmbeddingBagCollection)
