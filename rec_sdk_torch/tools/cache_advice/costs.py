"""Costs of a cache: the time of its swaps, by a model."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from ...operators.devices.backends import backend_for
from .simulation import Counts

_COPY_BYTES = 64 << 20
_REPEATS = 5


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second of copies between the host and a device.

    Attributes:
        to_device: into the cache.
        to_host: out of it.
        source: how they are known.
    """

    to_device: float
    to_host: float
    source: str

    def seconds(self, counts: Counts, record_bytes: int) -> float:
        """Modelled seconds of the swaps of one batch: bytes by bandwidth, nothing overlapped, no start-up times."""
        copied = counts.rows_in / self.to_device + counts.rows_out / self.to_host
        return copied * record_bytes / max(1, counts.batches)


def _best_rate(target: torch.Tensor, source: torch.Tensor, device: torch.device) -> float:
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return _COPY_BYTES / min(seconds)


def measure_bandwidth(device: torch.device) -> Bandwidth:
    """Measures copies of 64 MiB, from page-locked memory where the backend has that.

    Raises:
        ImportError, ValueError, NotImplementedError, RuntimeError: the device cannot be used.
    """
    pinned = backend_for(device).pin_staging
    host = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    there = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    source = f"copies of 64 MiB between the host and {device}, measured now"
    return Bandwidth(_best_rate(there, host, device), _best_rate(host, there, device), source)
