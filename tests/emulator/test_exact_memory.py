"""Operators on the EMULATED NPU, with a separate allocation for every tensor: kernels access no byte outside of
their tensors.
"""

from __future__ import annotations

import forked_python

# torch_npu's allocator returns parts of large blocks, in which an access out of bounds may go unnoticed.
PROGRAM = """
import torch
import forked_python
from rec_sdk_torch.operators.devices.backends import parse_device
from rec_sdk_torch.operators.schemas import COEFFICIENTS
rows, lookups, dim = 20, 5000, 8
def run(device):
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(lookups, dim, generator=generator).to(device)
    index = torch.randperm(lookups, generator=generator).int().to(device)
    slots = torch.arange(rows, dtype=torch.int32).to(device)
    offsets = torch.arange(0, lookups + 1, lookups // rows, dtype=torch.int32).to(device)
    cache, pending = torch.zeros(rows, dim).view(torch.uint8).to(device), torch.zeros(rows, 2 * dim).to(device)
    tables = torch.tensor([0, rows], dtype=torch.int32).to(device)
    row = torch.full((1, COEFFICIENTS), 0.5).to(device)
    segments = offsets, index, None, None, None
    torch.ops.rec_sdk.update_rows(cache, [grad], slots, tables, *segments, row, "sgd", dim, torch.float32)
    torch.ops.rec_sdk.accumulate_rows(pending, [grad], slots, *segments)
    return cache.cpu(), pending.cpu()
for found, expected in zip(run(parse_device("npu")), run("cpu")):
    assert torch.equal(found, expected)
print("same")
"""


def test_updates_stay_inside_their_workspace() -> None:
    finished = forked_python.python("-c", PROGRAM, PYTORCH_NO_NPU_MEMORY_CACHING="1")
    assert finished.stdout.splitlines()[-1:] == ["same"], finished.stderr
