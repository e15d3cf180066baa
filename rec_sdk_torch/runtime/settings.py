"""All environment variables that the package reads.

EMBCACHE_SIZE_ON_DEVICE_MEM, default 16GiB
    The device memory that a collection may use for its cache if `cache=` is not set: bytes, or a number with a unit
    (`512MiB`, `2GB`).

EMBCACHE_DIRECT_SWAP, default 0
    1: on CUDA, the kernels of a swap access page-locked host memory directly. 0: rows are copied through staging
    buffers on the device. `python -m benchmarks.cuda` measures which is faster.

EMBCACHE_SHARED_MEMORY, default 1
    1: ranks of one machine exchange host tensors of sharded tables through shared memory, where all ranks of a process
    group can. 0: they use the process group. If it is 0 on one rank, it is 0 for all.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_bytes(text: str, name: str) -> int:
    """Parses a size such as `"2GiB"`, `"512 MB"` or `"17179869184"`; returns bytes.

    Raises:
        ValueError: `text` is not a positive number below 2^63 with a known unit; the message begins with `name`.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match.group(2).upper()) if match else None
    size = float(match.group(1)) * unit if match and unit else 0.0
    if not 1 <= size < 2**63:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise ValueError(f"{name}: expected a size in bytes such as '2GiB' or '17179869184', below 2^63, got {shown!r}")
    return int(size)


def parse_switch(text: str, name: str) -> bool:
    """Parses `"0"` or `"1"` as a bool.

    Raises:
        ValueError: `text` is neither; the message begins with `name`.
    """
    if text not in ("0", "1"):
        raise ValueError(f"{name}: expected 0 or 1, got {text!r}")
    return text == "1"


@dataclass(frozen=True)
class Settings:
    """The values of the environment variables that this module documents."""

    embcache_size_on_device_mem: int
    embcache_direct_swap: bool
    embcache_shared_memory: bool


def read_settings() -> Settings:
    """Reads the settings from the environment.

    Raises:
        ValueError: a variable has an invalid value; the message names the variable.
    """
    name = "EMBCACHE_SIZE_ON_DEVICE_MEM"
    return Settings(
        embcache_size_on_device_mem=parse_bytes(os.environ.get(name, "16GiB"), name),
        embcache_direct_swap=parse_switch(os.environ.get("EMBCACHE_DIRECT_SWAP", "0"), "EMBCACHE_DIRECT_SWAP"),
        embcache_shared_memory=parse_switch(os.environ.get("EMBCACHE_SHARED_MEMORY", "1"), "EMBCACHE_SHARED_MEMORY"),
    )
