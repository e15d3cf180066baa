"""Process groups that the sharding tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ranks import Ranks, Start

from rec_sdk_torch.operators.devices.backends import parse_device


@pytest.fixture(scope="session")
def ranks_of(request: pytest.FixtureRequest) -> Iterator[Start]:
    """Returns the processes of a world size, which it starts at the first use."""
    kind = parse_device(request.config.getoption("--device")).type
    started: dict[int, Ranks] = {}

    def get(world_size: int) -> Ranks:
        if kind != "cpu" and torch.get_device_module(kind).device_count() < world_size:
            pytest.skip(f"{world_size} ranks need {world_size} devices")
        if world_size in started and not started[world_size].alive():
            del started[world_size]
        if world_size not in started:
            started[world_size] = Ranks(world_size, kind)
        return started[world_size]

    yield get
    for ranks in started.values():
        ranks.kill()
