"""Exchanges through shared memory: the bits of the process group's exchanges, in fewer messages, in reused segments."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import Place, error_of, on_ranks
from sharded_model import Scenario, assert_same, batch_of, sharded, train_sharded

from rec_sdk_torch.distributed import all_to_all
from rec_sdk_torch.distributed.shared_memory import ALIGNMENT, INLINE, Channel, connect

UNEVEN = ((5, 2, 0, 3), (0, 3, 1, 0), (1, 0, 0, 4), (0, 0, 0, 0))
MIXED = ("row_wise", "data_parallel", "table_wise")
CASES = {
    "bags": Scenario(optimizer=torch.optim.Adam, dims=(4, 8, 3), sizes=UNEVEN, steps=5, seed=81),
    "sequences": Scenario(kind="sequences", optimizer=torch.optim.Adagrad, sharding=MIXED, sizes=UNEVEN, seed=82),
    "weights": Scenario(kind="hash", weighted=True, dims=(4, 8, 4), sizes=((60, 2),), update="step", seed=83),
}
STATS = 3
"""Index of the counters of exchanges in the result of `train_sharded`."""


@on_ranks()
@pytest.mark.parametrize(
    ("name", "world_size", "depth"), [("bags", 2, 0), ("bags", 3, 2), ("sequences", 2, 1), ("weights", 2, 0)]
)
def test_the_bits_of_the_process_group(rank: int, world_size: int, name: str, depth: int) -> None:
    shared = train_sharded(rank, world_size, CASES[name], depth)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(all_to_all, "connect", lambda group: None)
        grouped = train_sharded(rank, world_size, CASES[name], depth)
    assert_same(shared[:STATS], grouped[:STATS])
    fewer = 0 if Place.device.type != "cpu" and not depth else CASES[name].steps * (world_size - 1)
    assert grouped[STATS]["messages"] - shared[STATS]["messages"] >= fewer, "ids are sent with their counts"


def channel_of(rank: int) -> Channel:
    """Connects the ranks of a new process group."""
    channel = connect(dist.new_group(backend="gloo", timeout=timedelta(seconds=30)))
    assert channel is not None
    return channel


def exchange(channel: Channel, size: int, wait: bool = True) -> None:
    ranks = len(channel.peers) + 1
    sent = [[np.full(size, 10 * channel.rank + to, np.uint8)] for to in range(ranks)]
    received = [np.zeros(size, np.uint8) for _ in range(ranks)]
    work = channel.start(0, sent, received)
    if wait:
        work.wait()
        assert [part.tolist() for part in received] == [[10 * of + channel.rank] * size for of in range(ranks)]


@on_ranks(2, 3)
def test_segments_are_used_again(rank: int) -> None:
    channel = channel_of(rank)
    for size in (0, 1, INLINE, INLINE + 1, 5 * ALIGNMENT + INLINE, 100_000, 3_000_000, 70_000) * 3:
        exchange(channel, size)
        exchange(channel, size, wait=False)
        exchange(channel, size)
    assert len(channel._segments) <= 3
    exchange(channel, 1)  # in which each rank learns that its last segments are free
    exchange(channel, 1)
    assert not any(segment.readers for segment in channel._segments)


@on_ranks(2, 3)
def test_more_messages_than_a_socket_holds(rank: int) -> None:
    channel = channel_of(rank)
    ranks, received = len(channel.peers) + 1, np.zeros((200, len(channel.peers) + 1, INLINE), np.uint8)
    works = [channel.start(0, [[np.full(INLINE, n, np.uint8)]] * ranks, list(received[n])) for n in range(200)]
    for work in works:
        work.wait()
    assert (received == np.arange(200, dtype=np.uint8)[:, None, None]).all()


@on_ranks(2)
def test_more_pieces_than_a_call_sends(rank: int) -> None:
    channel, received = channel_of(rank), np.zeros((2, 1100), np.uint8)
    channel.start(0, [list(np.full((1100, 1), rank, np.uint8))] * 2, list(received)).wait()
    assert received.tolist() == [[0] * 1100, [1] * 1100]


@on_ranks(2)
def test_received_data_in_place_keeps_its_segment(rank: int) -> None:
    channel, found = channel_of(rank), []
    for number in range(4):
        work = channel.start(0, [[np.full(10_000, number, np.uint8)]] * 2, None)
        work.wait()
        found.append(work.data[1 - rank])
    assert [set(tensor.tolist()) for tensor in found] == [{0}, {1}, {2}, {3}]
    assert len(channel._segments) == 4
    found.clear()
    del work
    for _ in range(9):
        exchange(channel, 10_000)
    assert len(channel._segments) <= 5, "a segment is known to be free after the next message"


@on_ranks(2)
def test_outputs_that_are_ignored_leave_no_segments(rank: int) -> None:
    if Place.device.type != "cpu":
        return
    scenario = Scenario(sizes=((200,),), ids=300, cache=400)
    tables: Any = sharded(scenario).module.sparse.eval()
    with torch.no_grad():
        for step in range(20):
            tables(batch_of(scenario, step))
    assert len(tables.exchange.rows_all_to_all._channel._segments) <= 3


@on_ranks(2)
def test_a_rank_that_cannot_share_memory(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EMBCACHE_SHARED_MEMORY", str(1 - rank))
        assert connect(dist.new_group(backend="gloo")) is None


@on_ranks(2)
def test_a_rank_in_another_exchange_is_an_error(rank: int) -> None:
    channel = channel_of(rank)
    message = error_of(lambda: exchange(channel, 7 + rank))
    assert f"rank {1 - rank} has sent {8 - rank} bytes of another exchange" in message
