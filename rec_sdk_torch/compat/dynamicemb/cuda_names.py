"""Redirection of CUDA names in dynamicemb's scripts to the NPU or the CPU, on machines without CUDA:

- `torch.device("cuda:0")`, `.cuda()` of tensors and modules, and `set_device`, `current_device`, `device_count`,
  `synchronize` of `torch.cuda`;
- the backend `nccl`, which is replaced by hccl or gloo, and `device_ids` of `torch.distributed.barrier`, which is
  ignored.
"""

from __future__ import annotations

import copyreg
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_DEVICE = torch.device


def _target_device_type() -> str | None:
    """Returns the device type that replaces CUDA: "npu" or "cpu"; None if CUDA is available."""
    if torch.cuda.is_available():
        return None
    npu = getattr(torch, "npu", None)
    return "npu" if npu is not None and npu.is_available() else "cpu"


class _Devices(type):
    """Metaclass of the class that replaces `torch.device`: `isinstance` and `issubclass` still accept real devices."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _DEVICE)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _DEVICE)


def _parse_device(kind: str, *args: Any, **kwargs: Any) -> torch.device:
    """Returns the device that `torch.device` would create from these arguments, with `kind` instead of CUDA."""
    device = _DEVICE(*args, **kwargs)
    if device.type != "cuda":
        return device
    return _DEVICE(kind) if kind == "cpu" or device.index is None else _DEVICE(kind, device.index)


def _rebuild_device(name: str) -> torch.device:
    return _DEVICE(name)


@functools.cache
def install() -> None:
    """Replaces the names, once per process."""
    kind = _target_device_type()
    if kind is None:
        return
    parse = functools.partial(_parse_device, kind)
    namespace = {"__new__": lambda cls, *args, **kwargs: parse(*args, **kwargs), "__module__": "torch"}
    # Devices are pickled as strings, because pickle would find the replacement class under the name torch.device.
    copyreg.pickle(_DEVICE, lambda device: (_rebuild_device, (str(device),)))
    torch.device = _Devices("device", (), namespace)  # type: ignore[misc,assignment]
    if kind == "npu":
        for name in ("set_device", "current_device", "device_count", "synchronize", "manual_seed", "manual_seed_all"):
            setattr(torch.cuda, name, getattr(torch.npu, name))  # type: ignore[attr-defined]
    else:
        torch.cuda.set_device = torch.cuda.synchronize = lambda *args, **kwargs: None  # the CPU needs neither
        torch.cuda.current_device = lambda: 0
        torch.cuda.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    for owner in (torch.Tensor, torch.nn.Module):
        owner.cuda = _cuda_method_moving_to(kind)  # type: ignore[method-assign]
    dist.init_process_group = _with_backend(dist.init_process_group, 0, kind)
    dist.new_group = _with_backend(dist.new_group, 2, kind)
    dist.barrier = _without_devices(dist.barrier)


def _cuda_method_moving_to(kind: str) -> Callable[..., Any]:
    def cuda(self: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Moves the tensor or module to the device that replaces CUDA."""
        index = getattr(device, "index", device)
        return self.to(_DEVICE(kind) if kind == "cpu" or index is None else _DEVICE(kind, index))

    return cuda


def _with_backend(function: Callable[..., Any], position: int, kind: str) -> Callable[..., Any]:
    """Returns `function` with gloo or hccl instead of nccl; `position` is the index of its argument `backend`."""
    backend = "gloo" if kind == "cpu" else "hccl"

    @functools.wraps(function)
    def translated(*args: Any, **kwargs: Any) -> Any:
        positional = list(args)
        if len(positional) > position and isinstance(positional[position], str):
            positional[position] = positional[position].replace("nccl", backend)
        if isinstance(kwargs.get("backend"), str):
            kwargs["backend"] = kwargs["backend"].replace("nccl", backend)
        return function(*positional, **kwargs)

    return translated


def _without_devices(barrier: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(barrier)
    def without_devices(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:  # nccl only
        return barrier(group=group, async_op=async_op)

    return without_devices
