"""Patches TorchRec's planner, so that `Topology` accepts `compute_device="npu"`.

Stock TorchRec asserts that there is no such device. DistributedModelParallel without a plan creates a Topology for its
own device type and accepts no other device type, so the constructor is wrapped. A plan names ranks only; the sharder or
DistributedModelParallel determines the device of a table.
"""

from __future__ import annotations

import functools
from typing import Any

from ..runtime.imports import after_import

HOST, DEVICE = "cpu", "cuda"
"""TorchRec's device types for ranks whose tables must fit into host memory, and into device memory."""

_planned_as = {"npu": HOST}  # because the tables' rows are in host memory


def install() -> None:
    """Patches the constructor of `Topology`, now or as soon as TorchRec's planner is imported."""
    after_import("torchrec.distributed.planner.types", _accept_npu)


def plan_npu_as(device: str) -> None:
    """Makes the planner treat NPUs like `device`, which is HOST or DEVICE."""
    _planned_as["npu"] = device


def _accept_npu(types: Any) -> None:
    construct = types.Topology.__init__

    @functools.wraps(construct)
    def taking_npu(self: Any, world_size: int, compute_device: str, *args: Any, **kwargs: Any) -> None:
        construct(self, world_size, _planned_as.get(compute_device, compute_device), *args, **kwargs)

    types.Topology.__init__ = taking_npu
