"""Training steps on the EMULATED NPU, whose trace test_launch_counts.py reads; each prints a line at its start."""

from __future__ import annotations

import sys

import torch

from rec_sdk_torch.tbe import Pooling, TableBatchedEmbedding, TableConfig, TableOptimizer


def take_steps(lookups: int, hot: int, pooling: Pooling, name: str) -> None:
    """Runs steps of one group in which most rows are cache misses; `hot` of the lookups are of a single row."""
    optimizer = TableOptimizer.create(torch.optim.SGD, {"lr": 0.1})
    config = TableConfig("t", 100_000, 16, pooling=pooling)
    embedding = TableBatchedEmbedding([config], optimizer=optimizer, cache=2 * (lookups - hot + 1), device="npu")
    offsets = torch.tensor([0, lookups]) if pooling is Pooling.NONE else torch.arange(0, lookups + 1, 10)
    generator = torch.Generator().manual_seed(0)
    grad = None
    for _ in range(4):
        ids = torch.randint(0, 100_000, (lookups,), generator=generator)
        ids[:hot] = 7
        torch.npu.synchronize()
        print("step of", name, file=sys.stderr, flush=True)
        out = embedding(ids, offsets)
        grad = torch.ones_like(out) if grad is None else grad
        out.backward(grad)
        torch.npu.synchronize()
        print("end of step", file=sys.stderr, flush=True)


if __name__ == "__main__":
    for argument in sys.argv[1:]:  # lookups, lookups of the hot row, pooling; such as 1020,1000,SUM
        lookups, hot, pooling = argument.split(",")
        take_steps(int(lookups), int(hot), Pooling[pooling], argument)
