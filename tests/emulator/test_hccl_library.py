"""libhccl.so of the EMULATED NPU, called directly.

The reference is NumPy, which combines values in the order of ranks.
"""

from __future__ import annotations

import base64
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import forked_python
import numpy as np
import pytest
import torch
from hccl_ranks import MAX, MIN, PROD, RECV, SEND, SUM, TYPES, Rank, SendRecvItem, new_root, run

SHARED = Path("/dev/shm")


def segments() -> set[str]:
    """Returns the shared-memory segments of this process, since tests in other processes have segments too."""
    return {path.name for path in SHARED.iterdir() if path.name.startswith(f"rec_sdk_hccl_{os.getpid()}_")}


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Any:
    before = segments()
    yield
    assert segments() <= before


# ---------------------------------------------------------------- values


def bits(values: np.ndarray) -> np.ndarray:
    """Returns the bfloat16 bits of float32 values, rounded to nearest."""
    return torch.from_numpy(values.astype(np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)


def sample(rank: int, count: int, name: str) -> np.ndarray:
    """Draws values whose floating-point sums depend on the order; 16-bit values have full significands."""
    draw = np.random.default_rng(100 + rank)
    if name == "bfloat16":
        return bits(draw.integers(128, 256, count) / 128)
    if name == "float16":
        return (draw.integers(1024, 2048, count) / 1024).astype(np.float16)
    if name in {"float32", "float64"}:
        return (draw.standard_normal(count) * 10.0 ** draw.integers(-6, 6, count)).astype(TYPES[name][1])
    return draw.integers(1, 8, count).astype(TYPES[name][1])


def reduced(parts: list[np.ndarray], op: int) -> np.ndarray:
    functions = {SUM: np.add, PROD: np.multiply, MAX: np.maximum, MIN: np.minimum}
    total = parts[0]
    for part in parts[1:]:
        total = functions[op](total, part)
    return total


# ---------------------------------------------------------------- functions that ranks run


def all_reduce(rank: Rank, name: str, count: int, op: int) -> np.ndarray:
    number, dtype = TYPES[name]
    buffer = rank.upload(sample(rank.rank, count, name))
    rank.call("HcclAllReduce", buffer, buffer, count, number, op)
    return rank.download(buffer, count, dtype)


def all_reduces(rank: Rank, cases: list[tuple[str, int, int]]) -> list[np.ndarray]:
    return [all_reduce(rank, *case) for case in cases]


def every_collective(rank: Rank) -> dict[str, np.ndarray]:
    """Runs the other collectives on float32; shapes differ between ranks where this is allowed."""
    n, me, number = rank.ranks, rank.rank, TYPES["float32"][0]
    results: dict[str, np.ndarray] = {}

    def empty(count: int) -> ctypes.c_void_p:
        return rank.upload(np.full(count, -1, np.float32))

    def numbers(values: list[int]) -> Any:
        return (ctypes.c_uint64 * len(values))(*values)

    samples = rank.upload(sample(me, 5, "float32"))
    out = empty(5 * n)
    rank.call("HcclAllGather", samples, out, 5, number)
    results["all_gather"] = rank.download(out, 5 * n, np.float32)

    counts = list(range(1, n + 1))  # rank r contributes r + 1
    offsets = list(np.cumsum([0, *counts[:-1]]).tolist())
    out = empty(sum(counts))
    rank.call("HcclAllGatherV", samples, me + 1, out, numbers(counts), numbers(offsets), number)
    results["all_gather_v"] = rank.download(out, sum(counts), np.float32)

    whole = rank.upload(sample(me, 5 * n, "float32"))
    out = empty(5)
    rank.call("HcclReduceScatter", whole, out, 5, number, SUM)
    results["reduce_scatter"] = rank.download(out, 5, np.float32)

    out = empty(me + 1)
    rank.call("HcclReduceScatterV", whole, numbers(counts), numbers(offsets), out, me + 1, number, SUM)
    results["reduce_scatter_v"] = rank.download(out, me + 1, np.float32)

    out = empty(5)
    rank.call("HcclReduce", samples, out, 5, number, SUM, n - 1)
    results["reduce"] = rank.download(out, 5, np.float32)

    both = rank.upload(sample(me, 5, "float32"))
    rank.call("HcclBroadcast", both, 5, number, n - 1)
    results["broadcast"] = rank.download(both, 5, np.float32)

    out = empty(5)
    rank.call("HcclScatter", whole if me == 0 else None, out, 5, number, 0)
    results["scatter"] = rank.download(out, 5, np.float32)

    out = empty(5 * n)
    rank.call("HcclAlltoAll", whole, 5, number, out, 5, number)
    results["all_to_all"] = rank.download(out, 5 * n, np.float32)

    # Rank r sends s + 1 elements to rank s, and so receives r + 1 from every rank.
    got = [me + 1] * n
    out = empty(sum(got))
    got_offsets = np.cumsum([0, *got[:-1]]).tolist()
    sent = (numbers(counts), numbers(offsets), number)
    rank.call("HcclAlltoAllV", whole, *sent, out, numbers(got), numbers(got_offsets), number)
    results["all_to_all_v"] = rank.download(out, sum(got), np.float32)

    # A ring, with both directions in one batch.
    left, right = empty(5), empty(5)
    rank.batch(
        SendRecvItem(SEND, samples, 5, number, (me + 1) % n),
        SendRecvItem(SEND, samples, 5, number, (me - 1) % n),
        SendRecvItem(RECV, left, 5, number, (me - 1) % n),
        SendRecvItem(RECV, right, 5, number, (me + 1) % n),
    )
    results["from_left"] = rank.download(left, 5, np.float32)
    results["from_right"] = rank.download(right, 5, np.float32)

    rank.call("HcclBarrier")
    rank.synchronize()
    return results


def expected_collectives(n: int) -> list[dict[str, np.ndarray]]:
    samples = [sample(r, 5, "float32") for r in range(n)]
    whole = [sample(r, 5 * n, "float32") for r in range(n)]
    first = np.cumsum([0, *range(1, n)]).tolist()  # start of the uneven part of each rank
    total = reduced(whole, SUM)
    nothing = np.full(5, -1, np.float32)
    return [
        {
            "all_gather": np.concatenate(samples),
            "all_gather_v": np.concatenate([samples[s][: s + 1] for s in range(n)]),
            "reduce_scatter": total[5 * r : 5 * r + 5],
            "reduce_scatter_v": total[first[r] : first[r] + r + 1],
            "reduce": reduced(samples, SUM) if r == n - 1 else nothing,
            "broadcast": samples[n - 1],
            "scatter": whole[0][5 * r : 5 * r + 5],
            "all_to_all": np.concatenate([part[5 * r : 5 * r + 5] for part in whole]),
            "all_to_all_v": np.concatenate([part[first[r] : first[r] + r + 1] for part in whole]),
            "from_left": samples[(r - 1) % n],
            "from_right": samples[(r + 1) % n],
        }
        for r in range(n)
    ]


# ---------------------------------------------------------------- tests


# (type, elements, operation): all types; all operations; no elements, fewer than ranks, more than fit into shared
# memory.
REDUCTIONS = [
    *((name, 1000, SUM) for name in TYPES),
    *(("float32", 7, op) for op in (PROD, MAX, MIN)),
    *(("float32", count, SUM) for count in (0, 1, 3_000_000)),
]


@pytest.fixture(scope="module")
def reductions() -> list[Any]:
    return run(all_reduces, 3, REDUCTIONS)


@pytest.mark.parametrize("case", range(len(REDUCTIONS)), ids=[f"{n}-{c}-{op}" for n, c, op in REDUCTIONS])
def test_all_reduce_in_the_order_of_ranks(reductions: list[Any], case: int) -> None:
    name, count, op = REDUCTIONS[case]
    parts = [sample(rank, count, name) for rank in range(3)]
    if name == "bfloat16":  # 16 bits are rounded once, at the end
        expected = bits(reduced([(part.astype(np.uint32) << 16).view(np.float32) for part in parts], op))
    elif name == "float16":
        expected = reduced([part.astype(np.float32) for part in parts], op).astype(np.float16)
    else:
        expected = reduced(parts, op)
    for results in reductions:
        assert isinstance(results, list), results
        np.testing.assert_array_equal(results[case], expected)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_other_collective(ranks: int) -> None:
    results = run(every_collective, ranks)
    for result, expected in zip(results, expected_collectives(ranks), strict=True):
        assert isinstance(result, dict), result
        assert result.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_array_equal(result[name], values, err_msg=name)


# ---------------------------------------------------------------- errors


def different_counts(rank: Rank) -> None:
    all_reduce(rank, "float32", 4 + rank.rank, SUM)


def different_types(rank: Rank) -> None:
    all_reduce(rank, ["float32", "int32"][rank.rank], 4, SUM)


def different_operations(rank: Rank) -> None:
    buffer = rank.upload(np.zeros(8, np.float32))
    if rank.rank == 0:
        rank.call("HcclAllGather", buffer, rank.upload(np.zeros(16, np.float32)), 8, 4)
    else:
        rank.call("HcclReduceScatter", buffer, rank.upload(np.zeros(4, np.float32)), 4, 4, SUM)
    rank.synchronize()


def different_roots(rank: Rank) -> None:
    rank.call("HcclBroadcast", rank.upload(np.zeros(4, np.float32)), 4, 4, 1 - rank.rank)
    rank.synchronize()


def short_receive(rank: Rank) -> None:
    buffer = rank.upload(np.zeros(4, np.float32))
    if rank.rank == 0:
        rank.call("HcclSend", buffer, 4, 4, 1)
    else:
        rank.call("HcclRecv", buffer, 3, 4, 0)
    rank.synchronize()


def die(rank: Rank) -> None:
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce(rank, "float32", 4, SUM)


def stay_away(rank: Rank) -> None:
    if rank.rank == 1:
        time.sleep(6)
    else:
        all_reduce(rank, "float32", 4, SUM)


def foreign_memory(rank: Rank) -> None:
    values = np.zeros(4, np.float32)
    address = ctypes.c_void_p(values.ctypes.data)
    rank.call("HcclAllReduce", address, address, 4, 4, SUM)
    rank.synchronize()


MISTAKES = {
    "counts": (different_counts, r"all_reduce \(collective 1\) on rank . .*number of elements is ., here it is ."),
    "types": (different_types, r"all_reduce .*its data type is ., here it is ."),
    "operations": (
        different_operations,
        r"rank . \(process \d+\) does something else: it is in (all_gather|reduce_scatter)",
    ),
    "roots": (different_roots, r"broadcast \(collective 1\) on rank . .*waiting for rank ."),
    "receive": (short_receive, "send/recv on rank 1 .*it sends 16 bytes, here 12 are expected"),
    "dead": (die, r"all_reduce .* on rank 0 .*: rank 1 \(process \d+\) has ended"),
    "away": (stay_away, r"on rank 0 .*nothing moved for 2 s, waiting for rank 1 \(process \d+\)"),
    "memory": (foreign_memory, "16 bytes is not inside one live allocation"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_an_error_that_names_ranks_and_operation(mistake: str) -> None:
    function, message = MISTAKES[mistake]
    begin = time.monotonic()
    results = run(function, 2, environment={"HCCL_EXEC_TIMEOUT": "2"})
    assert time.monotonic() - begin < 30
    texts = [result for result in results if isinstance(result, str)]
    assert texts, results
    assert any(re.search(message, text, re.DOTALL) for text in texts), "\n".join(texts)


def test_a_missing_rank_is_an_error() -> None:
    program = "import sys, base64, hccl_ranks; hccl_ranks.Rank(0, 2, base64.b64decode(sys.argv[1]))"
    root = base64.b64encode(new_root()).decode()
    finished = forked_python.python("-c", program, root, HCCL_CONNECT_TIMEOUT="1", PYTHONPATH=os.pathsep.join(sys.path))
    assert finished.returncode != 0
    assert "rank 0 of 2 waited 1 s for rank(s) 1 to join (HCCL_CONNECT_TIMEOUT)" in finished.stderr


def test_segments_of_a_crashed_process_are_removed() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    dead, alive = SHARED / f"rec_sdk_hccl_{process.pid}_1", SHARED / f"rec_sdk_hccl_{os.getpid()}_1"
    dead.touch()
    alive.touch()
    try:
        new_root()
        assert not dead.exists()
        assert alive.exists()
    finally:
        dead.unlink(missing_ok=True)
        alive.unlink()
