"""Groups of processes that the tests of sharding share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks_of() -> Iterator[Callable[[int], Ranks]]:
    """The processes of a world size, started at its first use."""
    started: dict[int, Ranks] = {}

    def get(world_size: int) -> Ranks:
        if world_size in started and not started[world_size].alive():
            del started[world_size]
        if world_size not in started:
            started[world_size] = Ranks(world_size)
        return started[world_size]

    yield get
    for ranks in started.values():
        ranks.close()
