"""Models the time that a cache takes to copy missing rows in and victims out."""

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
    """Bandwidth of copies between the host and a device, in bytes per second.

    Attributes:
        to_device: bandwidth of copies into the cache.
        to_host: bandwidth of copies out of the cache.
        source: description of how the bandwidth was obtained, for the report.
    """

    to_device: float
    to_host: float
    source: str

    def seconds(self, counts: Counts, record_bytes: int) -> float:
        """Returns the modelled mean time of one batch's copies, in seconds: their bytes divided by the bandwidth.

        Latency and overlap with computation are ignored.
        """
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
    """Measures the bandwidth with copies of 64 MiB; host memory is pinned if the backend pins its staging buffers.

    Raises:
        ImportError, ValueError, NotImplementedError, RuntimeError: the device cannot be used.
    """
    pinned = backend_for(device).pin_staging
    host = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    there = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    source = f"copies of 64 MiB between the host and {device}, measured now"
    return Bandwidth(_best_rate(there, host, device), _best_rate(host, there, device), source)
