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
    assert [case["devices"] for case in results["modelled"]] == [8, 1024] * 2
    case, distinct = results["modelled"][1], results["cases"][0]["unique_ids"]
    assert case["bytes"] == pytest.approx(distinct * 1023 / 1024 * (8 + 2 * 4 * 8))
    assert case["exchange_ms"] == pytest.approx(1e3 * (case["bytes"] / 25e9 + 4 * 1023 * 5e-6))
