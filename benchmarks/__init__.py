"""Benchmarks of this project; `python -m benchmarks NAME` runs one. README.md describes them."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .runner import Benchmark

MODULES = {
    "cpu": ["cpu"],
    "cuda": ["cuda"],
    "large": ["disk_store", "large_table", "many_tables"],
    "new_rows": ["new_rows"],
    "npu": ["npu"],
    "npu_scalar": ["npu_scalar"],
    "planning": ["planning"],
    "prefetch": ["prefetch"],
    "saves": ["background_saves", "checkpoint", "serving"],
    "sharded_step": ["sharded_step"],
    "sharding": ["sharding"],
    "variants": ["fbgemm", "fixed_cost", "optimizers", "rounding"],
    "whole_models": ["end_to_end"],
}
"""The table of all benchmarks: module -> names. A module is imported when one of its benchmarks runs."""
NAMES = {name: module for module, names in MODULES.items() for name in names}


def find(name: str) -> "Benchmark":
    """Returns the benchmark function for a name listed in `NAMES`."""
    found: Benchmark = getattr(importlib.import_module(f"benchmarks.{NAMES[name]}"), name)
    return found
