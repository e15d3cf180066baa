"""Runs one function on two ranks, each in a process of its own."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked_python
import pytest
import torch
import torch.multiprocessing as mp

from rec_sdk_torch.operators.devices.backends import parse_device

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


def run_ranks(function: Callable[..., None], device: torch.device, folder: Path, *args: Any) -> None:
    """Runs `function(rank, device, *args)` on two ranks with a device each; skips the test if there is only one
    device.
    """
    if device.type != "cpu" and torch.get_device_module(device).device_count() < 2:
        pytest.skip("two ranks need two devices")
    arguments = (function, device.type, str(folder / "store"), args)
    mp.start_processes(_run, arguments, nprocs=2, start_method=forked_python.CONTEXT.get_start_method())


def _run(rank: int, function: Callable[..., None], kind: str, store: str, args: tuple[Any, ...]) -> None:
    device = parse_device(kind if kind == "cpu" else f"{kind}:{rank}")
    if kind != "cpu":
        torch.get_device_module(device).set_device(device)
    torch.distributed.init_process_group(BACKENDS[kind], init_method=f"file://{store}", rank=rank, world_size=2)
    function(rank, device, *args)
    torch.distributed.barrier()  # no rank closes its sockets before the other has finished
    torch.distributed.destroy_process_group()
    gc.collect()  # models keep the process group and its threads alive; none may remain at interpreter exit
