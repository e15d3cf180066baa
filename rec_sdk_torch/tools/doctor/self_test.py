"""The self-test of a device: trains a small cached table, and the same table in plain torch."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass

import torch

from ...saves.saver import Saver
from ...tbe import Pooling, TableBatchedEmbedding, TableConfig, TableOptimizer

ROWS, DIM, BATCH, BAG = 20_000, 16, 1024, 4
LEAST_STEPS = 5
RATE = 0.05
TOLERANCE = 1e-4
"""Largest allowed difference of a weight: plain torch sums the gradients of equal ids in another order."""


@dataclass(frozen=True)
class Outcome:
    """The result of a self-test.

    Attributes:
        steps: number of training steps.
        seconds: duration of training, including the steps in plain torch.
        rows_in: number of rows that were copied to the cache.
        difference: largest absolute difference between a weight and the same weight in plain torch.
        saved: whether a save, loaded into another table, restored weights with the same bits.
    """

    steps: int
    seconds: float
    rows_in: int
    difference: float
    saved: bool

    @property
    def passed(self) -> bool:
        """Whether the device passed: the cache was used, weights agree, and the save restored the bits."""
        return self.saved and self.difference <= TOLERANCE and self.rows_in > 0

    def __str__(self) -> str:
        save = "a save loads with the same bits" if self.saved else "A SAVE LOADS WITH OTHER BITS"
        return (
            f"{self.steps} steps in {self.seconds:.1f} s, {self.rows_in} rows came to the cache, weights differ from "
            f"plain torch's by {self.difference:.1e} at the most (allowed {TOLERANCE:.0e}); {save}"
        )


def _table(device: torch.device, seed: int) -> TableBatchedEmbedding:
    return TableBatchedEmbedding(
        [TableConfig("t", ROWS, DIM, hashed=False, pooling=Pooling.SUM)],
        optimizer=TableOptimizer.create(torch.optim.Adagrad, {"lr": RATE}),
        cache=2 * BATCH * BAG,
        device=device,
        seed=seed,
    )


def train(device: torch.device, seconds: float) -> Outcome:
    """Trains a table on `device` and in plain torch on the host with the same batches, then tests a save and a load.

    Raises:
        Exception: any error of training, saving or loading.
    """
    draws = torch.Generator(device="cpu").manual_seed(0)
    ours, everything = _table(device, seed=1), torch.arange(ROWS, device="cpu")
    plain = torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", device="cpu")
    with torch.no_grad():
        plain.weight.copy_(ours.view("t").read(everything).parts["weight"])
    optimizer = torch.optim.Adagrad(plain.parameters(), lr=RATE)
    offsets = torch.arange(0, BATCH * BAG + 1, BAG, device="cpu")
    start, steps = time.monotonic(), 0
    while steps < LEAST_STEPS or time.monotonic() - start < seconds:
        ids = (torch.rand(BATCH * BAG, generator=draws, device="cpu") ** 3 * ROWS).long()
        target = torch.randn((BATCH, DIM), generator=draws, device="cpu")
        (ours(ids, offsets) - target.to(device)).square().mean(dim=1).sum().backward()
        optimizer.zero_grad()
        (plain(ids, offsets[:-1]) - target).square().mean(dim=1).sum().backward()
        optimizer.step()
        steps += 1
    spent = time.monotonic() - start
    found = ours.view("t").read(everything).parts["weight"]
    difference = float((found - plain.weight.detach()).abs().max())
    return Outcome(steps, spent, ours.cache_stats()["rows_in"], difference, _save_restores_rows(ours, device, found))


def _save_restores_rows(table: TableBatchedEmbedding, device: torch.device, expected: torch.Tensor) -> bool:
    other = _table(device, seed=2)
    with tempfile.TemporaryDirectory(prefix="rec_sdk_torch-doctor-") as folder:
        Saver().load(other, Saver().save(table, folder))
    return torch.equal(other.view("t").read(torch.arange(ROWS, device="cpu")).parts["weight"], expected)
