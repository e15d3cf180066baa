"""The CPU backend: the cache is in host memory."""

from __future__ import annotations

import contextlib
import mmap

import torch

from ..._engine import available_memory

__all__ = ["allocate_cache", "free_memory"]

_HUGE_PAGE = 2 << 20


def allocate_cache(rows: int, width: int, device: torch.device) -> torch.Tensor:
    """Allocates a uint8 matrix, in huge pages if possible: with 4 KiB pages, random reads would miss the TLB."""
    size = rows * width
    if size < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty((rows, width), dtype=torch.uint8, device="cpu")
    # MAP_PRIVATE, because most systems disable huge pages for shared memory, which is mmap's default.
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a Linux kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    aligned = -buffer.data_ptr() % _HUGE_PAGE
    return buffer[aligned : aligned + size].view(rows, width)


def free_memory(device: torch.device) -> int:
    """Returns the bytes of host memory that can still be allocated."""
    return available_memory()
