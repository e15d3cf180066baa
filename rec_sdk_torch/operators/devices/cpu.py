"""The cache in host memory."""

from __future__ import annotations

import contextlib
import mmap

import torch

from ..._engine import available_memory

__all__ = ["allocate_cache", "free_memory"]

_HUGE_PAGE = 2 << 20


def allocate_cache(rows: int, width: int, device: torch.device) -> torch.Tensor:
    """A uint8 matrix in huge pages where the system has them: rows are read at random, 4 KiB pages miss the TLB."""
    size = rows * width
    if size < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty((rows, width), dtype=torch.uint8, device="cpu")
    # Private: huge pages of shared memory, mmap's default, are off in most systems.
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    aligned = -whole.data_ptr() % _HUGE_PAGE
    return whole[aligned : aligned + size].view(rows, width)


def free_memory(device: torch.device) -> int:
    """Bytes of host memory that can still be allocated."""
    return available_memory()
