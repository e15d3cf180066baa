"""Swaps do not block the host during training; only streams wait for each other.

A gate blocks a stream; host code that completes in the meantime cannot have waited for the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from embeddings import one_table, windowed
from stream_gate import Gate

from rec_sdk_torch import emulate
from rec_sdk_torch.operators.calls import ops
from rec_sdk_torch.operators.devices.backends import backend_for
from rec_sdk_torch.tbe import Pooling
from rec_sdk_torch.tbe.cache.transfers import Transfers, _streams

ROWS, DIM, CACHE = 200, 8, 60
PATIENCE = 20.0
"""The seconds after which a waiting step is released; a machine that needs more time for a step fails the test."""


@pytest.fixture
def accelerator(device: torch.device) -> torch.device:
    if device.type == "cpu":
        pytest.skip("the CPU has no streams")
    return device


def current_stream(device: torch.device) -> Any:
    return torch.get_device_module(device).current_stream(device)


@dataclass
class Kind:
    """A kind of table, and its training options."""

    pooling: Pooling = Pooling.NONE
    weighted: bool = False
    window: int = 1


class Training:
    """A training run in which every step subtracts 1 from the looked-up rows and swaps most of the cache."""

    def __init__(self, device: torch.device, kind: Kind) -> None:
        self.device, self.kind, self.steps = device, kind, 0
        options = {"pooling": kind.pooling, "hashed": False, "init_fn": torch.nn.init.zeros_, "cache": CACHE}
        optimizer = windowed("SGD", kind.window, lr=1.0)
        self.embedding = one_table(device, rows=ROWS, dim=DIM, optimizer=optimizer, **options)
        self.offsets = torch.arange(51) if kind.pooling is not Pooling.NONE else torch.tensor([0, 50])
        self.grad = torch.ones(50, DIM, device=device)
        self.weights = torch.ones(50, device=device, requires_grad=True) if kind.weighted else None
        self.counts = torch.zeros(ROWS)

    def step(self) -> torch.Tensor:
        """Runs a step; returns the looked-up rows before the update."""
        ids = (torch.arange(50) + 50 * self.steps) % ROWS
        self.steps += 1
        self.counts[ids] += 1
        rows: torch.Tensor = self.embedding(ids, self.offsets, self.weights)
        rows.backward(self.grad)
        return rows

    def expected(self) -> torch.Tensor:
        """Returns the rows that the next step looks up."""
        ids = (torch.arange(50) + 50 * self.steps) % ROWS
        return -self.counts[ids, None].expand(50, DIM).clone()

    def table(self) -> torch.Tensor:
        return self.embedding.state_dict()["t.weight"]


def completes_while_blocked(stream: Any, action: Callable[[], object], patience: float = PATIENCE) -> bool:
    """Returns whether the host completes `action` while the stream is blocked."""
    with Gate(stream, patience) as gate:
        action()
        return gate.closed


KINDS = {
    "sequence": Kind(),
    "sum": Kind(Pooling.SUM),
    "mean": Kind(Pooling.MEAN),
    "weighted": Kind(Pooling.MEAN, weighted=True),
    "window": Kind(window=3),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_training_step_waits_for_nothing(accelerator: torch.device, name: str) -> None:
    kind = KINDS[name]
    if emulate.active() and (kind.weighted or kind.window > 1):
        pytest.skip("uses operators of ATen, for which the emulated NPU's host waits")
    training = Training(accelerator, kind)
    # seven steps look up more rows than the table has, so rows are fetched again; step 7 does not end a window
    for _ in range(5):
        training.step()
    stream = current_stream(accelerator)
    completes_while_blocked(
        stream, training.step
    )  # warms up the allocators, since a step needs more memory while the stream is blocked
    assert completes_while_blocked(stream, training.step)
    assert torch.equal(training.table()[:, 0], -training.counts) or kind.window > 1


@pytest.mark.parametrize("wait", ["a copy to the host", "a synchronisation"])
def test_the_gate_detects_a_wait(accelerator: torch.device, wait: str) -> None:
    training = Training(accelerator, Kind())
    training.step()
    stream = current_stream(accelerator)
    action = stream.synchronize if wait == "a synchronisation" else lambda: training.step().cpu()
    assert not completes_while_blocked(stream, action, patience=0.2)


def test_the_lookup_stream_waits_for_fetched_rows(accelerator: torch.device) -> None:
    """The lookup's stream waits for fetched rows; the host does not."""
    training = Training(accelerator, Kind())
    for _ in range(5):
        training.step()
    inward, _ = _streams(accelerator)
    expected = training.expected()
    with Gate(inward, PATIENCE) as gate:
        rows = training.step()
        current = current_stream(accelerator)
        assert gate.closed
        assert not current.query(), "the lookup waits"
        gate.open()
    assert torch.equal(rows.detach().cpu(), expected)
    assert torch.equal(training.table()[:, 0], -training.counts)


def test_the_host_waits_for_write_backs_it_needs(accelerator: torch.device) -> None:
    """The host waits for a write-back when it needs one of its rows; lookups and other rows do not wait."""
    training = Training(accelerator, Kind())
    for _ in range(5):
        training.step()
    _, outward = _streams(accelerator)
    with Gate(outward, PATIENCE) as gate:
        training.step()
        current_stream(accelerator).synchronize()
        training.embedding.cache_stats()
        training.step()
        assert gate.closed
    with Gate(outward, 0.2) as gate:
        training.step()
        training.steps -= 2  # rows of the latest victims
        training.step()
        assert not gate.closed
    assert torch.equal(training.table()[:, 0], -training.counts)


def test_a_write_back_waits_for_an_update_on_another_stream(accelerator: torch.device) -> None:
    options = {"pooling": Pooling.NONE, "init_fn": torch.nn.init.zeros_, "cache": 2}
    embedding = one_table(accelerator, rows=50, dim=DIM, optimizer=windowed("SGD", 1, lr=1.0), **options)
    module = torch.get_device_module(accelerator)

    def step(*ids: int) -> torch.Tensor:
        rows: torch.Tensor = embedding(torch.tensor(ids), torch.tensor([0, 2]))
        rows.backward(torch.ones(2, DIM, device=accelerator))
        return rows[:, 0].detach()

    step(3, 4)
    side = module.Stream(accelerator)
    with Gate(side, PATIENCE) as gate:
        with module.stream(side):
            step(3, 4)
        step(5, 6)
        assert gate.closed
    assert step(3, 4).tolist() == [-2.0, -2.0]
    assert step(5, 6).tolist() == [-1.0, -1.0]


def test_received_memory_is_not_reused_while_in_use(accelerator: torch.device) -> None:
    transfers = Transfers(accelerator, backend_for(accelerator))
    cache = torch.zeros((1000, 16), dtype=torch.uint8, device=accelerator)
    (slots,) = transfers.to_device(np.arange(1000, dtype=np.int32))
    with Gate(current_stream(accelerator), PATIENCE) as gate:
        ops.scatter_rows(cache, slots, *transfers.to_device(np.ones((1000, 16), np.uint8)))
        others = [transfers.upload_arrays([np.zeros((1000, 16), np.uint8)]) for _ in range(20)]
        _streams(accelerator)[0].synchronize()
        assert gate.closed
    assert cache.cpu().bool().all()
    del others


def test_sent_memory_is_not_reused_before_the_copy_ends(accelerator: torch.device) -> None:
    transfers = Transfers(accelerator, backend_for(accelerator))
    cache = torch.zeros((1000, 16), dtype=torch.uint8, device=accelerator)
    cache[:500] = 1
    ones, zeros = transfers.to_device(*np.arange(1000, dtype=np.int32).reshape(2, 500))
    with Gate(_streams(accelerator)[1], PATIENCE) as gate:
        departure = transfers.download(ops.gather_rows(cache, ones))
        others = [ops.gather_rows(cache, zeros) for _ in range(20)]
        current_stream(accelerator).synchronize()
        assert gate.closed
    assert departure.wait().bool().all()
    del others
