"""A description of the machine on which results were measured."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rec_sdk_torch._engine import available_memory
from rec_sdk_torch.operators.schemas import cpu_isa

# A block above the mmap threshold is returned to the system when freed and page-faults at its next use. Outputs and
# gradients would be timed with the kernel clearing pages. Whole tables are still mapped.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(128 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}


def with_malloc_settings(command: Sequence[str]) -> None:
    """Restarts as `python *command` with glibc's malloc set to keep freed blocks, unless it is set already."""
    if all(name in os.environ for name in _MALLOC) or not sys.platform.startswith("linux"):
        return
    environment = {**_MALLOC, **os.environ}
    os.execve(sys.executable, [sys.executable, *command], environment)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _cpu_model() -> str:
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith(("model name", "Model name")):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _caches() -> list[str]:
    root = Path("/sys/devices/system/cpu/cpu0/cache")
    levels = sorted(root.glob("index*"))
    return [f"L{_read(i / 'level')} {_read(i / 'type')} {_read(i / 'size')}" for i in levels]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def resident_memory() -> int:
    """Returns the resident memory of this process in bytes."""
    fields = _read(Path("/proc/self/statm")).split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if fields else 0


def access_free_memory(bytes: int) -> None:
    """Writes to each page of this much free memory, at most half of it, and releases it.

    A virtual machine may return free memory to its host after a few seconds (free page reporting). Then the next access
    to a page costs 5 to 10 us instead of half a microsecond. Call this just before a measurement that takes new memory.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    np.empty(min(bytes, available_memory() // 2), dtype=np.uint8)[::page] = 1


def reset_peak_memory() -> None:
    """Lets `resource.getrusage` report the peak resident memory of this process from now on, where Linux can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def load_average() -> list[float]:
    """Returns the load average over 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def describe() -> dict[str, Any]:
    """Returns a description of the processor, memory, software and settings."""
    return {
        "cpu": _cpu_model(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "caches": _caches(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "free_memory_bytes": available_memory(),
        "transparent_hugepages": _read(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("torch", "fbgemm_gpu-cpu", "fbgemm_gpu", "torchrec")},
        "isa": cpu_isa(),
        "torch_threads": torch.get_num_threads(),
        "malloc": {name: os.environ.get(name) for name in _MALLOC},
        "load_average": load_average(),
    }
