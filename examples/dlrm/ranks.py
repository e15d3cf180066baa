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
    """Which of how many processes this is, and its device."""

    rank: int
    count: int
    device: torch.device
    hosts: dist.ProcessGroup | None
    """Messages between hosts: gloo, also where the devices have a backend of their own."""

    def agreed(self, value: Any) -> Any:
        """The value that rank 0 has, on all ranks."""
        if self.hosts is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.hosts, device=torch.device("cpu"))
        return values[0]

    def at_first(self, work: Callable[[], None]) -> None:
        """Does it on rank 0, before any rank goes on.

        Raises:
            InputError: rank 0 raised it; all ranks do then.
        """
        problem = None
        if self.rank == 0:
            try:
                work()
            except InputError as error:
                problem = str(error)
        problem = self.agreed(problem)
        if problem is not None:
            raise InputError(problem)

    def leave(self) -> None:
        """Ends the process group."""
        if self.hosts is not None:
            dist.barrier(group=self.hosts)  # neither closes its sockets before the other is through
            dist.destroy_process_group()


def join(kind: str) -> Ranks:
    """The ranks of torchrun on devices of a kind: "cpu", "cuda" or "npu"; a single one without torchrun.

    Raises:
        InputError: there is no such device, or there are fewer than ranks.
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
    """The model that the ranks train together: each has a part of the rows of every table, and the dense part."""
    if ranks.hosts is None:
        return model
    sharders = get_default_hybrid_sharders(ShardingEnv.from_process_group(ranks.hosts))
    constraints = {name: ParameterConstraints(sharding_types=["row_wise"]) for name in features}
    plan = EmbeddingShardingPlanner(constraints=constraints).collective_plan(model, sharders, dist.group.WORLD)
    divided: nn.Module = DistributedModelParallel(model, device=ranks.device, plan=plan, sharders=sharders)
    return divided
