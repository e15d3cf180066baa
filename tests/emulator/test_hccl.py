"""torch.distributed with backend "hccl", two ranks on the EMULATED NPU. The reference is arithmetic on the host."""

from __future__ import annotations

import os
import re
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked_python
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

RANKS = 2
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int8)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def values(rank: int, count: int = 6, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 30, (count,), generator=generator).to(dtype)


def equal(actual: Tensor, expected: Tensor) -> None:
    assert actual.device.type == "npu"
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0)


# ---------------------------------------------------------------- what both ranks run


def all_reduce(me: int, device: torch.device) -> None:
    for dtype in DTYPES:
        data = values(me, dtype=dtype).to(device)
        dist.all_reduce(data)
        equal(data, values(0, dtype=dtype) + values(1, dtype=dtype))
    for op, expected in (
        (dist.ReduceOp.MAX, torch.maximum(values(0), values(1))),
        (dist.ReduceOp.AVG, (values(0) + values(1)) / 2),
    ):
        data = values(me).to(device)
        dist.all_reduce(data, op=op)
        equal(data, expected)


def all_gather(me: int, device: torch.device) -> None:
    data = values(me).to(device)
    parts = [torch.empty_like(data) for _ in range(RANKS)]
    dist.all_gather(parts, data)
    whole = torch.empty(6 * RANKS, device=device)
    dist.all_gather_into_tensor(whole, data)
    for rank in range(RANKS):
        equal(parts[rank], values(rank))
    equal(whole, torch.cat([values(0), values(1)]))


def uneven_all_gather(me: int, device: torch.device) -> None:
    parts = [torch.empty(rank + 1, device=device) for rank in range(RANKS)]
    dist.all_gather(parts, values(me, me + 1).to(device))
    for rank in range(RANKS):
        equal(parts[rank], values(rank, rank + 1))


def reduce_scatter(me: int, device: torch.device) -> None:
    out = torch.empty(3, device=device)
    dist.reduce_scatter_tensor(out, values(me).to(device))
    equal(out, (values(0) + values(1))[3 * me : 3 * me + 3])
    dist.reduce_scatter(out, list(values(me).to(device).split(3)))
    equal(out, (values(0) + values(1))[3 * me : 3 * me + 3])


def all_to_all(me: int, device: torch.device) -> None:
    out = torch.empty(6, device=device)
    dist.all_to_all_single(out, values(me).to(device))
    equal(out, torch.cat([values(rank)[3 * me : 3 * me + 3] for rank in range(RANKS)]))
    parts = [torch.empty(3, device=device) for _ in range(RANKS)]
    dist.all_to_all(parts, list(values(me).to(device).split(3)))
    equal(torch.cat(parts), torch.cat([values(rank)[3 * me : 3 * me + 3] for rank in range(RANKS)]))


def uneven_all_to_all(me: int, device: torch.device) -> None:
    """Checks an exchange like a sharded lookup's: rank 0 keeps one element and sends five; rank 1 sends none."""
    given = [[1, 5], [0, 6]]
    got = [given[rank][me] for rank in range(RANKS)]
    out = torch.empty(sum(got), device=device)
    dist.all_to_all_single(out, values(me).to(device), got, given[me])
    starts = [0 if me == 0 else given[rank][0] for rank in range(RANKS)]
    equal(out, torch.cat([values(r)[starts[r] : starts[r] + got[r]] for r in range(RANKS)]))


def from_one_or_to_one(me: int, device: torch.device) -> None:
    data = values(me).to(device)
    dist.broadcast(data, 1)
    equal(data, values(1))
    data = values(me).to(device)
    dist.reduce(data, 0)
    equal(data, values(0) + values(1) if me == 0 else values(1))
    out = torch.empty(6, device=device)
    dist.scatter(out, [values(7).to(device), values(8).to(device)] if me == 0 else None, 0)
    equal(out, values(7 + me))
    parts = [torch.empty(6, device=device) for _ in range(RANKS)] if me == 1 else None
    dist.gather(values(me).to(device), parts, 1)
    for rank, part in enumerate(parts or []):
        equal(part, values(rank))


def send_and_receive(me: int, device: torch.device) -> None:
    data, out = values(me).to(device), torch.empty(6, device=device)
    if me == 0:
        dist.send(data, 1)
        dist.recv(out, 1)
    else:
        dist.recv(out, 0)
        dist.send(data, 0)
    equal(out, values(1 - me))
    out.zero_()
    exchange = [dist.P2POp(dist.isend, data, 1 - me), dist.P2POp(dist.irecv, out, 1 - me)]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    equal(out, values(1 - me))


def asynchronous(me: int, device: torch.device) -> None:
    data = [values(me + 10 * i).to(device) for i in range(5)]
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in data]:
        work.wait()
    for i, tensor in enumerate(data):
        equal(tensor, values(10 * i) + values(1 + 10 * i))


def views_and_large_tensors(me: int, device: torch.device) -> None:
    whole = torch.zeros(1_000_003, device=device)
    part = whole[1:]
    part.fill_(me + 1)
    dist.all_reduce(part)
    assert (whole[0].item(), part.min().item(), part.max().item()) == (0, 3, 3)


def barriers_and_objects(me: int, device: torch.device) -> None:
    dist.barrier()
    gathered: list[Any] = [None] * RANKS
    dist.all_gather_object(gathered, {"rank": me})
    assert gathered == [{"rank": 0}, {"rank": 1}]


def groups(me: int, device: torch.device) -> None:
    alone = [dist.new_group([rank]) for rank in range(RANKS)]
    both = dist.new_group([0, 1])
    data = values(me).to(device)
    dist.all_reduce(data, group=alone[me])
    equal(data, values(me))
    dist.all_reduce(data, group=both)
    equal(data, values(0) + values(1))


def data_parallel(me: int, device: torch.device) -> None:
    torch.manual_seed(me)  # DDP broadcasts the weights of rank 0
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 1))
    if me == 0:
        state = {name: value.clone() for name, value in model.state_dict().items()}
    parallel = nn.parallel.DistributedDataParallel(model.to(device), device_ids=[device.index])
    parallel(values(me).to(device)[None]).sum().backward()
    if me == 0:
        alone = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 1))
        alone.load_state_dict(state)
        (sum(alone(values(rank)[None]).sum() for rank in range(RANKS)) / RANKS).backward()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.cpu(), theirs.grad)


CHECKS: dict[str, Callable[[int, torch.device], None]] = {
    check.__name__: check
    for check in (
        all_reduce,
        all_gather,
        uneven_all_gather,
        reduce_scatter,
        all_to_all,
        uneven_all_to_all,
        from_one_or_to_one,
        send_and_receive,
        asynchronous,
        views_and_large_tensors,
        barriers_and_objects,
        groups,
        data_parallel,
    )
}


def work(rank: int, port: int, results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(RANKS))
    device = torch.device(f"npu:{rank}")
    torch.npu.set_device(device)
    dist.init_process_group("hccl")
    for name, check in CHECKS.items():
        try:
            check(rank, device)
        except Exception:
            results.put((name, rank, traceback.format_exc()))
        else:
            results.put((name, rank, ""))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, int], str]:
    """Returns the error of each check on each rank. Both ranks run all checks, since starting a rank takes seconds."""
    results = forked_python.CONTEXT.Queue()
    start_method = forked_python.CONTEXT.get_start_method()
    spawned = mp.start_processes(work, (free_port(), results), nprocs=RANKS, join=False, start_method=start_method)
    outcomes: dict[tuple[str, int], str] = {}
    deadline = time.monotonic() + 200
    try:
        while len(outcomes) < RANKS * len(CHECKS) and time.monotonic() < deadline:
            if not results.empty():
                name, rank, error = results.get()
                outcomes[name, rank] = error
            elif spawned.join(timeout=0.1):
                break
    except mp.ProcessRaisedException as error:
        outcomes["start", 0] = str(error)
    while not results.empty():
        name, rank, error = results.get()
        outcomes[name, rank] = error
    return outcomes


@pytest.mark.parametrize("check", CHECKS)
def test_collectives_of_two_ranks(outcomes: dict[tuple[str, int], str], check: str) -> None:
    for rank in range(RANKS):
        error = outcomes.get((check, rank), f"rank {rank} did not get there: {outcomes.get(('start', 0))}")
        assert not error, error


MISMATCH = """
import os, torch, torch.distributed as dist
print(f"process {os.getpid()}.", flush=True)
dist.init_process_group("hccl")
rank = dist.get_rank()
torch.npu.set_device(rank)
x = torch.ones(4 + rank, device="npu")
try:
    dist.all_reduce(x)
    torch.npu.synchronize()
except RuntimeError as error:
    print(f"raised {error}", flush=True)
"""


def test_a_mismatch_is_an_error_in_python(tmp_path: Path) -> None:
    script = tmp_path / "mismatch.py"
    script.write_text(MISMATCH)
    finished = forked_python.torchrun(RANKS, script, HCCL_EXEC_TIMEOUT="5")
    output = finished.stdout + finished.stderr
    assert re.search(r"raised .*all_reduce \(collective \d+\) on rank .*number of elements is", output, re.DOTALL), (
        output
    )
    of_ranks = {f"rec_sdk_hccl_{process}_" for process in re.findall(r"process (\d+)\.", output)}
    assert len(of_ranks) == RANKS
    left = [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(tuple(of_ranks))]
    assert not left, "shared memory"
