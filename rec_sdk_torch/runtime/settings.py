"""Every environment variable the package reads, in one place.

EMBCACHE_SIZE_ON_DEVICE_MEM, default 16GiB
    Device memory a collection may use for its cache when no `cache=` is given: bytes, or a number with a
    unit (`512MiB`, `2GB`).

EMBCACHE_DIRECT_SWAP, default 0
    1: on CUDA, the kernels of a swap read and write page-locked host memory themselves, instead of copies through
    staging on the device. Which is faster is for `python -m benchmarks.cuda` to say.
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
    """Bytes meant by `text`, such as `"2GiB"`, `"512 MB"` or `"17179869184"`.

    Raises:
        ValueError: not a positive number below 2^63 with a known unit; the message names `name`.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match.group(2).upper()) if match else None
    size = float(match.group(1)) * unit if match and unit else 0.0
    if not 1 <= size < 2**63:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise ValueError(f"{name}: expected a size in bytes such as '2GiB' or '17179869184', below 2^63, got {shown!r}")
    return int(size)


def parse_switch(text: str, name: str) -> bool:
    """`"0"` or `"1"`.

    Raises:
        ValueError: anything else; the message names `name`.
    """
    if text not in ("0", "1"):
        raise ValueError(f"{name}: expected 0 or 1, got {text!r}")
    return text == "1"


@dataclass(frozen=True)
class Settings:
    """The settings that the environment asks for; see the module's table."""

    embcache_size_on_device_mem: int
    embcache_direct_swap: bool


def read_settings() -> Settings:
    """The settings in force now.

    Raises:
        ValueError: a variable holds something that cannot be read; the message names it.
    """
    name = "EMBCACHE_SIZE_ON_DEVICE_MEM"
    return Settings(
        embcache_size_on_device_mem=parse_bytes(os.environ.get(name, "16GiB"), name),
        embcache_direct_swap=parse_switch(os.environ.get("EMBCACHE_DIRECT_SWAP", "0"), "EMBCACHE_DIRECT_SWAP"),
    )
