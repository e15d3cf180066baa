"""A model that estimates the time of AscendC kernels on a chip from counters. No time is measured.

On each core the engines that copy in (MTE2), copy out (MTE3) and compute (vector) and the scalar unit that issues their
instructions run in parallel. So a core takes as long as its busiest engine, and a launch as long as its slowest core. A
launch takes at least the time of its bytes at the bandwidth of the chip's memory; a constant time is added to each
launch. Hits in the L2 cache and memory conflicts are left out.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rec_sdk_torch import emulate

Counts = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Chip:
    """Constants of a chip, with their source in `benchmarks/README.md`."""

    name: str
    hbm_bytes_per_s: float
    """The bandwidth of the whole chip."""
    core_bytes_per_s: float
    """One core's copies from or to global memory, each direction."""
    copy_issue_s: float
    """Engine time that a copy takes whatever its size."""
    clock_hz: float
    vector_issue_cycles: float
    """The fixed cycles of a vector instruction of any size, including the barrier before an instruction that depends on
    it."""
    launch_s: float
    """The fixed seconds of a launch, whatever its kernel does."""

    def byte_seconds(self, size: float) -> float:
        """Returns the seconds that `size` bytes take at the memory's bandwidth."""
        return size / self.hbm_bytes_per_s


CHIPS = (
    Chip("910B", 1.49e12, 32 * 1.85e9, 20.9 / 1.85e9, 1.85e9, 15, 5e-6),
    Chip("950", 1.63e12, 16 * 1.65e9, 38.8 / 1.65e9, 1.65e9, 15, 5e-6),
)


@dataclass(frozen=True)
class Kernel:
    """The counters of one kernel since the last reset; arrays hold one value per core."""

    name: str
    launches: int
    counters: Mapping[str, Counts]

    @property
    def bytes(self) -> Counts:
        """Exact number of bytes moved between global memory and each core."""
        return self.counters["mte2_gm_bytes"] + self.counters["mte3_gm_bytes"]

    def imbalance(self, cores: int) -> float:
        """Returns the bytes of the busiest core over the mean of all cores, minus 1."""
        total = self.bytes.sum()
        return float(self.bytes.max() * cores / total - 1) if total else 0.0

    def engine_seconds(self, chip: Chip) -> dict[str, Counts]:
        """Computes the busy time of each engine of each core."""
        c = self.counters
        copies = {
            engine: c[f"{engine}_instructions"] * chip.copy_issue_s + c[f"{engine}_gm_bytes"] / chip.core_bytes_per_s
            for engine in ("mte2", "mte3")
        }
        cycles = c["vector_instructions"] * chip.vector_issue_cycles + c["vector_cycles"]
        return {**copies, "vector": cycles / chip.clock_hz, "scalar": c["scalar_instructions"] / chip.clock_hz}

    def seconds(self, chip: Chip) -> tuple[float, str]:
        """Models the time of the launches; returns it with the name of the limiting resource."""
        engines = {name: float(seconds.max()) for name, seconds in self.engine_seconds(chip).items()}
        bounds = {**engines, "hbm": chip.byte_seconds(float(self.bytes.sum()))}
        name = max(bounds, key=lambda bound: bounds[bound])
        return self.launches * chip.launch_s + bounds[name], name

    def with_scalar(self, instructions: Sequence[int]) -> Kernel:
        """Returns a copy whose counters include the scalar instructions of each core of a launch."""
        counts = np.zeros_like(self.bytes)
        counts[: len(instructions)] = instructions
        return replace(self, counters={**self.counters, "scalar_instructions": counts})


@dataclass(frozen=True)
class LeastCopies:
    """Minimum number of row copies, summed over all cores, that any implementation of a kernel needs."""

    copies_in: float
    copies_out: float
    rows: int
    """Copied in or out."""

    ROW_INSTRUCTIONS = 4
    """The scalar unit's least for a row, loops apart: it reads a slot, makes both addresses, issues the copy."""

    def seconds(self, kernels: Sequence[Kernel], least_bytes: int, cores: int, chip: Chip) -> float:
        """Models the minimum time of these kernels, in which all cores share the work of each engine evenly."""
        seconds = [chip.byte_seconds(least_bytes), self.ROW_INSTRUCTIONS * self.rows / cores / chip.clock_hz]
        for engine, copies in (("mte2", self.copies_in), ("mte3", self.copies_out)):
            size = sum(float(kernel.counters[f"{engine}_gm_bytes"].sum()) for kernel in kernels)
            seconds.append((copies * chip.copy_issue_s + size / chip.core_bytes_per_s) / cores)
        return max(seconds) + chip.launch_s * sum(kernel.launches for kernel in kernels)


class EmulatedCounters:
    """The counters of the emulated NPU in this process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(emulate.library_directory() / "librec_sdk_ascendc.so"))
        self._library.rec_sdk_emulator_counters.restype = ctypes.c_char_p
        self._library.rec_sdk_ascendc_vector_cores.restype = ctypes.c_int64
        self._library.rec_sdk_ascendc_vector_cores.argtypes = (ctypes.c_void_p,)

    def vector_cores(self) -> int:
        """Returns the emulated chip's number of vector cores on the default stream; requires a current device."""
        return int(self._library.rec_sdk_ascendc_vector_cores(None))

    def reset(self) -> None:
        """Sets every counter to zero."""
        self._library.rec_sdk_emulator_reset_counters()

    def read(self) -> list[Kernel]:
        """Returns the counters of every kernel since the last reset. The caller must first wait for the device."""
        text: bytes = self._library.rec_sdk_emulator_counters()
        kernels = []
        for name, values in json.loads(text).items():
            counters = {key: np.asarray(value, np.float64) for key, value in values.items() if isinstance(value, list)}
            kernels.append(Kernel(name, values["launches"], counters))
        return kernels


def total_bytes(kernels: Sequence[Kernel]) -> int:
    """Sums the bytes of all kernels of an operator."""
    return int(sum(kernel.bytes.sum() for kernel in kernels))
