"""The processes that torchrun started, their devices, and a model that is divided among them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from support.errors import InputError
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.types import ShardingEnv

from rec_sdk_torch import emulate, get_default_hybrid_sharders


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, the number of processes, and its device."""

    rank: int
    count: int
    device: torch.device
    hosts: dist.ProcessGroup | None
    """Messages between hosts: gloo, also where the devices have a backend of their own."""

    def broadcast(self, value: Any) -> Any:
        """Returns rank 0's value on all ranks."""
        if self.hosts is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.hosts, device=torch.device("cpu"))
        return values[0]

    def on_rank_0_first(self, work: Callable[[], None]) -> None:
        """Runs `work` on rank 0 before any rank continues.

        Raises:
            InputError: `work` raised it on rank 0; it is then raised on all ranks.
        """
        problem = None
        if self.rank == 0:
            try:
                work()
            except InputError as error:
                problem = str(error)
        problem = self.broadcast(problem)
        if problem is not None:
            raise InputError(problem)

    def leave(self) -> None:
        """Ends the process group."""
        if self.hosts is not None:
            dist.barrier(group=self.hosts)  # no rank closes its sockets while another still uses them
            dist.destroy_process_group()


def join(kind: str) -> Ranks:
    """Returns the ranks of torchrun on devices of a kind: "cpu", "cuda" or "npu". Without torchrun, there is one rank.

    Raises:
        InputError: there is no such device, or fewer devices than ranks.
    """
    device = torch.device(kind)
    if kind != "cpu":
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None or found.type != kind:
            hint = f". {emulate.hint()}" if kind == "npu" else ""
            raise InputError(f"--device {kind}: torch sees no such device here{hint}")
        device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
        if device.index >= torch.accelerator.device_count():
            raise InputError(f"--device {kind}: {device} is not there, {torch.accelerator.device_count()} are")
        torch.accelerator.set_device_index(device.index)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Ranks(0, 1, device, None)
    dist.init_process_group(dist.get_default_backend_for_device(device))
    return Ranks(dist.get_rank(), dist.get_world_size(), device, dist.new_group(backend="gloo"))


def divide(model: nn.Module, features: list[str], ranks: Ranks) -> nn.Module:
    """Divides the model: each rank holds a part of the rows of every table, and the whole dense part."""
    if ranks.hosts is None:
        return model
    sharders = get_default_hybrid_sharders(ShardingEnv.from_process_group(ranks.hosts))
    constraints = {name: ParameterConstraints(sharding_types=["row_wise"]) for name in features}
    plan = EmbeddingShardingPlanner(constraints=constraints).collective_plan(model, sharders, dist.group.WORLD)
    divided: nn.Module = DistributedModelParallel(model, device=ranks.device, plan=plan, sharders=sharders)
    return divided
