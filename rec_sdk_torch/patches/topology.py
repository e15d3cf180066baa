"""Changes TorchRec's planner: `Topology` takes `compute_device="npu"`.

Stock TorchRec asserts that there is no such device. DistributedModelParallel makes a Topology of its device's type
where it is given no plan, and there is no place to ask for another one, so the constructor is wrapped. A plan names
ranks only; the device of tables is that of their sharder, or of DistributedModelParallel.
"""

from __future__ import annotations

import functools
from typing import Any

from ..runtime.imports import after_import

HOST, DEVICE = "cpu", "cuda"
"""TorchRec's names for ranks whose tables have to fit into host memory, and into that of a device."""

_planned_as = {"npu": HOST}  # where the rows are


def install() -> None:
    """Lets every Topology made from now on take NPUs: now if TorchRec's planner is imported, else when it will be."""
    after_import("torchrec.distributed.planner.types", _accept_npu)


def plan_npu_as(device: str) -> None:
    """Lets the planner plan NPUs as if they were `device`, HOST or DEVICE."""
    _planned_as["npu"] = device


def _accept_npu(types: Any) -> None:
    construct = types.Topology.__init__

    @functools.wraps(construct)
    def taking_npu(self: Any, world_size: int, compute_device: str, *args: Any, **kwargs: Any) -> None:
        construct(self, world_size, _planned_as.get(compute_device, compute_device), *args, **kwargs)

    types.Topology.__init__ = taking_npu
