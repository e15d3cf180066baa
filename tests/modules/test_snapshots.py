"""Saves, copies and loads during training in other threads see all tables at a single moment.

The expected values follow by arithmetic: every step looks up the same ids in every table, with gradient 1 and learning
rate 1. So at any moment, a row's weight is minus the number of its steps, in every table.
"""

from __future__ import annotations

import copy
import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forked_python
import numpy as np
import pytest
import torch
from batches import jagged
from collection_factory import apply, bag_config, bags_collection, index_bag_config

sys.path.insert(0, str(Path(__file__).parents[1]))  # needed when this file runs as a program

import rec_sdk_torch as rst

IDS = 3000
BATCH = 3
CACHE = 16
LOOKED_UP = ("t0", "t1", "t2", "t3")


def make(device: torch.device, lr: float, optimizer: type = torch.optim.SGD, high: float = 0.0, window: int = 1) -> Any:
    """Builds hash tables t0 and t2 and index tables t1 and t3 in three groups, with weights from 0 to `high`."""
    options: dict[str, Any] = {"num_embeddings": IDS, "weight_init_min": 0.0, "weight_init_max": high}
    tables = [
        bag_config(**options),
        index_bag_config("t1", ["f1"], **options),
        bag_config("t2", ["f2"], **options, embedding_dim=8),
        index_bag_config("t3", ["f3"], **options, embedding_dim=16),
    ]
    return apply(bags_collection(device, *tables, cache=CACHE), optimizer, lr=lr, window=window)


def batch_of(ids: np.ndarray) -> Any:
    return jagged({f"f{n}": [[int(i)] for i in ids] for n in range(4)})


def train(collection: Any, rng: np.random.Generator) -> None:
    collection(batch_of(rng.choice(IDS, BATCH, replace=False))).values().sum().backward()


def rows_of(state: Mapping[str, torch.Tensor], table: str) -> torch.Tensor:
    """Returns weights `[IDS, D]` of a table by id; 0 for an id that a hash table does not have."""
    weight = state[f"embedding_bags.{table}.weight"]
    ids = state.get(f"embedding_bags.{table}.ids", torch.arange(IDS))
    return torch.zeros(IDS, weight.shape[1]).index_copy(0, ids, weight)


def steps_of(state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Returns the number of training steps of each id; fails if tables differ."""
    steps = -rows_of(state, "t0")[:, 0]
    for table in LOOKED_UP:
        rows = -rows_of(state, table)
        wrong = (rows != steps[:, None]).any(dim=1).nonzero().flatten().tolist()
        assert not wrong, (
            f"table {table}: ids {wrong[:5]} have {rows[wrong[:5], 0].tolist()} steps, not as in t0, "
            + str(steps[wrong[:5]].tolist())
        )
    assert int(steps.sum()) % BATCH == 0, f"{int(steps.sum())} lookups are no whole batches of {BATCH}"
    return steps


@contextmanager
def beside(work: Callable[[], None], threads: int = 1) -> Iterator[list[BaseException]]:
    """Calls `work` repeatedly in other threads during the block; yields their errors, and finally raises the first."""
    over = threading.Event()
    errors: list[BaseException] = []

    def loop() -> None:
        try:
            while not over.is_set():
                work()
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=loop, daemon=True) for _ in range(threads)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for worker in workers:
            worker.start()
        yield errors
    finally:
        over.set()
        for worker in workers:
            worker.join(60)
        sys.setswitchinterval(interval)
    assert not any(worker.is_alive() for worker in workers), "a thread does not come back"
    if errors:
        raise errors[0]


def save(collection: Any) -> dict[str, torch.Tensor]:
    return dict(collection.state_dict())


def save_of_a_copy(collection: Any) -> dict[str, torch.Tensor]:
    return save(copy.deepcopy(collection))


HOW = pytest.mark.parametrize("take", [save, save_of_a_copy])


@HOW
def test_a_save_reads_every_row_unchanged(device: torch.device, take: Callable[[Any], dict[str, torch.Tensor]]) -> None:
    """With learning rate 0, training does not change rows; it only moves them between cache and host store."""
    collection = make(device, lr=0.0, high=1.0)
    collection(batch_of(np.arange(BATCH)))  # builds the tables
    rng = np.random.default_rng(0)
    for first in range(0, IDS, CACHE):
        collection(batch_of(np.arange(first, min(first + CACHE, IDS)))).values().sum().backward()
    expected = save(collection)
    with beside(lambda: train(collection, rng)):
        for _ in range(30):
            found = take(collection)
            assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []


@HOW
def test_a_save_sees_all_tables_at_one_moment(
    device: torch.device, take: Callable[[Any], dict[str, torch.Tensor]]
) -> None:
    collection = make(device, lr=1.0)
    train(collection, np.random.default_rng(0))
    rngs = np.random.default_rng(1)
    last = torch.zeros(IDS)
    with beside(lambda: train(collection, rngs)):
        for _ in range(40):
            steps = steps_of(take(collection))
            assert (steps >= last).all(), "moments come in order"
            last = steps
    assert last.sum() > 0


def test_optimizer_states_are_of_one_moment(device: torch.device) -> None:
    """Adagrad's sum of squares counts each row's steps; `step` counts all steps."""
    collection = make(device, lr=1.0, optimizer=torch.optim.Adagrad)
    rng = np.random.default_rng(0)
    train(collection, rng)
    with beside(lambda: train(collection, rng)):
        for _ in range(40):
            state = collection.fused_optimizer.state_dict()["state"]
            counts = {}
            for table in LOOKED_UP:
                values = state[f"embedding_bags.{table}.weight"]
                counts[table] = (
                    float(values[f"{table}.momentum1"][:, 0].sum()),
                    BATCH * float(values[f"{table}.step"]),
                )
            assert len({count for pair in counts.values() for count in pair}) == 1, f"lookups, and by steps: {counts}"


def load_beside_refusals(device: torch.device, seconds: float) -> None:
    """Loads repeatedly while another thread runs batches that are too large for the cache."""
    collection = make(device, lr=1.0)
    for seed in range(10):
        train(collection, np.random.default_rng(seed))
    states = [save(collection), save(make(device, lr=1.0))]
    rng = np.random.default_rng(0)
    refused = 0

    def refuse() -> None:
        nonlocal refused
        ids = rng.choice(IDS, CACHE + 1, replace=False) + IDS * int(rng.integers(1, 4))
        features = {"f0": [[1, 2]], "f1": [[1]], "f2": [ids.tolist()], "f3": [[3]]}
        try:
            collection(jagged(features))
        except rst.CacheTooSmallError:
            refused += 1
        else:
            raise AssertionError("not refused")

    end = time.monotonic() + seconds
    loads = 0
    with beside(refuse, threads=2) as errors:
        while not errors and (time.monotonic() < end or min(loads, refused) < 20):
            state = states[loads % 2]
            collection.load_state_dict(state)
            found = save(collection)
            differ = [name for name, value in state.items() if not torch.equal(value, found[name])]
            assert not differ, f"load {loads}: {differ} are not as loaded"
            loads += 1
    train(collection, rng)
    steps_of(save(collection))


def all_at_once(device: torch.device, seconds: float) -> None:
    for window in (1, 2):
        train_save_and_load(device, seconds / 2, window)


def train_save_and_load(device: torch.device, seconds: float, window: int) -> None:
    """Runs two training threads, a saving and a loading one; a load may be refused while a batch is in flight."""
    collection = make(device, 1.0, window=window)
    for seed in range(4 * window):
        train(collection, np.random.default_rng(seed))
    states = [save(collection)]
    rngs = {}
    counts = {"steps": 0, "saves": 0, "loads": 0, "refused": 0}

    def trains() -> None:
        rng = rngs.setdefault(threading.get_ident(), np.random.default_rng(len(rngs)))
        train(collection, rng)
        counts["steps"] += 1
        time.sleep(float(rng.uniform(0, 2e-3)))  # leaves time without a batch in flight, in which a load can succeed

    def saves() -> None:
        state = save(collection)
        steps_of(state)
        states[:] = [states[-1], state]
        counts["saves"] += 1

    def loads() -> None:
        try:
            collection.load_state_dict(states[0])
            counts["loads"] += 1
        except RuntimeError as error:
            if "in flight" not in str(error):
                raise
            counts["refused"] += 1
        time.sleep(1e-3)

    end = time.monotonic() + seconds
    with beside(trains, threads=2) as a, beside(saves) as b, beside(loads) as c:
        while not (a or b or c) and (time.monotonic() < end or min(counts["saves"], counts["loads"]) < 5):
            time.sleep(0.02)
            if time.monotonic() > end + 90:
                raise AssertionError(f"no progress: {counts}")
    steps_of(save(collection))
    print(counts, flush=True)


@pytest.mark.parametrize("times", [1.0, pytest.param(30.0, marks=pytest.mark.full)])
@pytest.mark.parametrize(("scenario", "seconds"), [("load_beside_refusals", 1.0), ("all_at_once", 2.0)])
def test_threads_in_another_process(device: torch.device, scenario: str, seconds: float, times: float) -> None:
    """Runs this file as a program: loads during refused batches, then threads that train, save and load."""
    arguments = (__file__, scenario, str(device), str(seconds * times), "120.0")
    done = forked_python.python(*arguments, PYTHONPATH=str(Path(__file__).parents[1]))
    assert done.returncode == 0, f"{done.args}: {done.returncode}\n{done.stdout}\n{done.stderr[-6000:]}"


if __name__ == "__main__":
    faulthandler.dump_traceback_later(float(sys.argv[4]), exit=True)
    globals()[sys.argv[1]](torch.device(sys.argv[2]), float(sys.argv[3]))
