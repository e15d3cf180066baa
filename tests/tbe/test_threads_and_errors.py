"""Concurrent threads, errors and interrupts in the middle of a step, and reads between steps."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from embeddings import SGD, embedding_of, one_table, weights_of, windowed
from torchrec.optim import RowWiseAdagrad

from rec_sdk_torch.tbe import Pooling, TableBatchedEmbedding, TableConfig, TableOptimizer
from rec_sdk_torch.tbe.cache import accumulation, device_cache
from rec_sdk_torch.tbe.cache.swap import Swap
from rec_sdk_torch.tbe.rows.row_parts import write_parts
from rec_sdk_torch.tbe.step import optimizer_passes as between

IDS = 500
DIM = 4


def make(window: int, cache: int, device: torch.device) -> TableBatchedEmbedding:
    options = {"pooling": Pooling.NONE, "hashed": False, "init_fn": torch.nn.init.zeros_, "cache": cache}
    return one_table(device, rows=IDS, dim=DIM, optimizer=windowed("SGD", window, lr=1.0), **options)


def step(embedding: TableBatchedEmbedding, ids: list[int]) -> None:
    rows = embedding(torch.tensor(ids, dtype=torch.int64), torch.tensor([0, len(ids)]))
    rows.backward(torch.ones_like(rows))


def weights(embedding: TableBatchedEmbedding) -> list[float]:
    with torch.no_grad():
        return embedding(torch.arange(IDS), torch.tensor([0, IDS]))[:, 0].tolist()


def test_independent_embeddings_train_in_parallel_threads(device: torch.device) -> None:
    """Independent embeddings on one device give the same results in parallel threads as one after the other."""

    def train(seed: int) -> list[float]:
        embedding = make(1, 60, device)
        for ids in np.random.default_rng(seed).integers(0, IDS, (30, 50)):
            step(embedding, ids.tolist())
        return weights(embedding)

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(train, range(4)))
    assert together == [train(seed) for seed in range(4)]


@pytest.mark.parametrize("window", [1, 3])
def test_threads_lose_no_update(device: torch.device, window: int) -> None:
    embedding = make(window, 60, device)
    batches = np.random.default_rng(0).integers(0, IDS, (3, 41, 10))
    torn: list[bool] = []

    def train(own_batches: np.ndarray) -> None:
        for ids in own_batches:
            step(embedding, ids.tolist())

    def read() -> None:
        for _ in range(40):
            with torch.no_grad():
                rows = embedding(torch.arange(IDS), torch.tensor([0, IDS]))
            torn.append(not torch.equal(rows, rows[:, :1].expand_as(rows)))

    threads = [threading.Thread(target=train, args=(own_batches,)) for own_batches in batches] + [
        threading.Thread(target=read)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = np.bincount(batches.ravel(), minlength=IDS)
    assert weights(embedding) == (-counts).tolist(), "3 * 41 backwards are whole windows of 1 and of 3"
    assert not any(torn)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("part", ["_allocate_victim_buffers", "_launch_swap", "_download_victims"])
@pytest.mark.parametrize("window", [1, 2])
def test_an_interrupt_in_the_swap_loses_nothing(device: torch.device, window: int, part: str, when: str) -> None:
    embedding = make(window, 4, device)
    step(embedding, [0, 1, 2, 3])
    original = getattr(Swap, part)

    def interrupted(*arguments: Any) -> None:
        if when == "after":
            original(*arguments)
        raise KeyboardInterrupt

    with mock.patch.object(Swap, part, interrupted), pytest.raises(KeyboardInterrupt):
        step(embedding, [2, 3, 4, 5])
    step(embedding, [2, 3, 4, 5])
    step(embedding, [0, 1, 6, 7])
    step(embedding, [4, 5, 6, 7])
    assert weights(embedding)[:9] == [-2.0, -2.0, -2.0, -2.0, -2.0, -2.0, -2.0, -2.0, 0.0]


@pytest.mark.parametrize("window", [1, 2])
def test_an_error_in_the_second_groups_update_loses_nothing(device: torch.device, window: int) -> None:
    """The next call completes the update: no row of the first group is updated twice, none of the second is skipped."""
    configs = [
        TableConfig(
            name, IDS, DIM, pooling=Pooling.NONE, hashed=False, weight_dtype=dtype, init_fn=torch.nn.init.zeros_
        )
        for name, dtype in (("a", torch.float32), ("b", torch.float16))
    ]
    embedding = embedding_of(*configs, optimizer=windowed("SGD", window, lr=1.0), cache=60, device=device)
    place, name = (device_cache, "update_rows") if window == 1 else (accumulation, "accumulate_rows")
    original, made = getattr(place, name), [0]

    def fails_once(*arguments: Any) -> None:
        made[0] += 1
        if made[0] == 2:
            raise OSError("no memory")
        original(*arguments)

    def step() -> None:
        rows = embedding(torch.tensor([1, 2, 1, 2]), torch.tensor([0, 2, 4]))
        rows.backward(torch.ones_like(rows))

    with mock.patch.object(place, name, fails_once):
        with pytest.raises(OSError, match="no memory"):
            step()
        for _ in range(2 * window - 1):
            step()
    for name in "ab":
        found = weights_of(embedding, range(4), name)[:, 0].tolist()
        assert found == [0.0, -2.0 * window, -2.0 * window, 0.0], name


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_between_two_updates_repeats_nothing(device: torch.device, when: str) -> None:
    """The optimizer averages weights after each update, and replaces weights by averages after the third.

    After an interrupt between two groups, the next call completes this.
    """
    options = {"lr": 0.5, "step_ema": 1, "step_start": 0, "step_swap": 4, "step_ema_coef": 0.5}
    config = TableConfig("t", IDS, DIM, pooling=Pooling.NONE, hashed=False)
    plain, struck = (
        embedding_of(config, optimizer=(RowWiseAdagrad, options), device=device, cache=60) for _ in range(2)
    )
    for embedding in (plain, struck):
        step(embedding, [1, 2])
    step(plain, [2, 3])

    def interrupted(*arguments: Any) -> None:
        if when == "after":
            write_parts(*arguments)
        raise KeyboardInterrupt

    with mock.patch.object(between, "write_parts", interrupted), pytest.raises(KeyboardInterrupt):
        step(struck, [2, 3])
    for embedding in (plain, struck):
        step(embedding, [1, 4])
    assert weights(struck) == weights(plain)


def test_reading_first_moves_only_rows_that_changed(device: torch.device) -> None:
    options = {"pooling": Pooling.NONE, "hashed": False, "cache": 100}
    embedding = one_table(device, rows=2_000_000, dim=DIM, optimizer=None, **options).eval()
    before = embedding(torch.tensor([7, 9]), torch.tensor([0, 2]))
    view = embedding.view("t")
    view.write(torch.tensor([9]), {"weight": torch.ones(1, DIM)})
    assert [chunk.ids.tolist() for chunk in view.chunks(kept=True)] == [[9]]
    embedding.set_optimizers({0: TableOptimizer.create(*SGD)})
    assert [chunk.ids.tolist() for chunk in view.chunks(kept=True)] == [[9]]
    after = embedding(torch.tensor([7, 9]), torch.tensor([0, 2]))
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[1], torch.ones_like(after[1]))


def test_window_without_rows_counts_as_open(device: torch.device) -> None:
    embedding = make(2, 10, device)
    step(embedding, [])
    assert embedding.layout.window_open()
    embedding.layout.discard_gradients()
    assert not embedding.layout.window_open()
    step(embedding, [1])
    assert weights(embedding)[1] == 0.0
    step(embedding, [1])
    assert weights(embedding)[1] == -2.0
