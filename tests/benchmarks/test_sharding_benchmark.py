"""The sharding benchmark in seconds: what it counts and models, never how long anything took."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import warm
from torch.multiprocessing.spawn import start_processes

pytest.importorskip("torchrec", reason="sharding is TorchRec's")

from benchmarks import sharding


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("sharding") / "results.json"
    with pytest.MonkeyPatch.context() as patch:  # ranks that need not import torch, see warm.py
        patch.setattr(sharding, "spawn", partial(start_processes, start_method=warm.CONTEXT.get_start_method()))
        assert sharding.main(["--quick", "--ranks", "1", "2", "--json", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_bytes_are_counted(results: dict[str, Any]) -> None:
    assert [(case["ids"], case["ranks"]) for case in results["cases"]] == [
        (ids, ranks) for ids in ("power law 1.05", "uniform") for ranks in (1, 2)
    ]
    for case in results["cases"]:
        assert case["lookups"] == 512
        assert 0 < case["unique_ids"] < 512
        assert case["steps_per_second"] > 0
        if case["ranks"] == 1:
            assert case["exchanged_bytes"] == case["least_bytes"] == 0
        else:
            assert 0.9 < case["exchanged_bytes"] / case["least_bytes"] < 1.1, "ids are about even"
            assert case["exchanged_bytes"] < case["bytes_with_duplicates"]
            assert case["exchanged_bytes"] == pytest.approx(case["id_bytes"] * (8 + 2 * 4 * 8) / 8)


def test_the_model_is_arithmetic_of_what_was_counted(results: dict[str, Any]) -> None:
    sizes = [(8, 1), (1024, 1), (1024, 8), (1024, 16), (1024, 32)]
    assert [(case["devices"], case["local_size"]) for case in results["modelled"]] == sizes * 2
    case, distinct = results["modelled"][1], results["cases"][0]["unique_ids"]
    assert case["bytes"] == pytest.approx(distinct * 1023 / 1024 * (8 + 2 * 4 * 8))
    assert case["exchange_ms"] == pytest.approx(1e3 * (case["bytes"] / 25e9 + 4 * 1023 * 5e-6))
    assert case["messages"] == 4 * 1023
    for case, size, speed in zip(results["modelled"][2:5], (8, 16, 32), (100e9, 100e9, 25e9), strict=True):
        machines, of_id = 1024 // size, distinct * (8 + 2 * 4 * 8)
        within, between = of_id * (size - 1) / size, of_id * (machines - 1) / machines
        assert case["bytes"] == pytest.approx(within + between)
        assert case["messages"] == 4 * (size - 1 + machines - 1)
        assert case["exchange_ms"] == pytest.approx(1e3 * (within / speed + between / 25e9 + case["messages"] * 5e-6))
        assert case["status_ms"] == pytest.approx(1e3 * 2 * (size + machines - 2) * 5e-6)
