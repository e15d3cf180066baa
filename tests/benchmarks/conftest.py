"""A fixture for all tests of the benchmarks."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _collects_little() -> Iterator[None]:
    """A benchmark collects garbage before each measurement: a quarter of a second, where torch has been imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
