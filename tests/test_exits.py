"""The interpreter exits with status 0 and no output while threads train, look up, save, plan ahead or follow saves."""

from __future__ import annotations

import atexit
import functools
import itertools
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from interpreter_exits import Interpreters

from rec_sdk_torch.runtime import exits
from rec_sdk_torch.runtime.worker import Pool
from rec_sdk_torch.saves.format import files
from rec_sdk_torch.saves.format.folders import latest_save
from rec_sdk_torch.saves.saver import Saver
from rec_sdk_torch.saves.serve import table_reader
from rec_sdk_torch.serving import TableReader
from rec_sdk_torch.tbe import Pooling, TableBatchedEmbedding, TableConfig, TableOptimizer
from rec_sdk_torch.tbe.cache.device_cache import Group

ROWS, IDS = 1000, 64


@pytest.fixture(autouse=True)
def _on_the_host(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("a process that is forked from one with a device's threads cannot use the device")


@pytest.fixture(scope="module")
def interpreters() -> Iterator[Interpreters]:
    made = Interpreters(Path(__file__).stem)
    yield made
    made.close()


Scene = Callable[[int, Path], None]


def make() -> TableBatchedEmbedding:
    table = TableConfig("t", ROWS, 8, pooling=Pooling.SUM, track_changes=True)
    optimizer = TableOptimizer.create(torch.optim.SGD, {"lr": 0.1})
    return TableBatchedEmbedding([table], optimizer=optimizer, cache=ROWS)


def batch(count: int = IDS) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, ROWS, (count,)), torch.arange(count + 1)


def train(embedding: TableBatchedEmbedding) -> None:
    embedding(*batch()).sum().backward()


def trained() -> TableBatchedEmbedding:
    embedding = make()
    train(embedding)
    return embedding


def run_in_daemon_thread(work: Callable[[], object]) -> None:
    """Runs `work` repeatedly in a daemon thread; returns after its first run."""
    begun = threading.Event()

    def run() -> None:
        while True:
            work()
            begun.set()

    threading.Thread(target=run, daemon=True).start()
    begun.wait()


def sleep_shortly(number: int) -> None:
    time.sleep(random.Random(number).random() * 0.005)


def check_at_exit(check: Callable[[], bool]) -> None:
    """Prints a message at interpreter exit, after the threads were stopped, if `check` is false."""
    weakref.finalize(Pool, lambda: check() or print("it is not so:", check))


# ---- threads that may be at any point when the main thread ends


def a_daemon_trains(number: int, _: Path) -> None:
    run_in_daemon_thread(functools.partial(train, trained()))
    sleep_shortly(number)


def a_daemon_looks_up(number: int, _: Path) -> None:
    embedding = trained().eval()
    run_in_daemon_thread(lambda: embedding(*batch()))
    sleep_shortly(number)


def a_daemon_prefetches(number: int, _: Path) -> None:
    embedding = trained()

    def train_ahead() -> None:
        batches = [batch() for _ in range(4)]
        for each in batches:
            embedding.prefetch(*each)
        for each in batches:
            embedding(*each).sum().backward()

    run_in_daemon_thread(train_ahead)
    sleep_shortly(number)


def a_daemon_serves(number: int, folder: Path) -> None:
    path = folder / str(number)
    Saver().save(trained(), path)
    reader = TableReader(path, "t")
    run_in_daemon_thread(lambda: reader.lookup(np.arange(IDS)))
    sleep_shortly(number)


def a_daemon_saves(number: int, folder: Path) -> None:
    embedding, path, turns = trained(), folder / str(number), itertools.cycle((False, True))

    def save() -> None:
        train(embedding)
        if next(turns):
            Saver().save(embedding, path, background=True).result()
        else:
            Saver().save(embedding, path, incremental=True)

    run_in_daemon_thread(save)
    sleep_shortly(number)


def a_daemon_is_in_the_engine(number: int, _: Path) -> None:
    """Calls the engine directly, in a way that the package does not track."""
    engine = trained().groups[0].engine
    run_in_daemon_thread(lambda: engine.tables.row_count(0))
    sleep_shortly(number)


def a_reader_follows(number: int, folder: Path) -> None:
    embedding, path = trained(), folder / str(number)
    saves = itertools.cycle([Path(Saver().save(embedding, path)) for _ in range(2)])
    table_reader.latest_save = lambda _: next(saves)  # a different save each time
    reader = TableReader(path, "t", follow=1e-6)
    check_at_exit(lambda: not reader._thread.is_alive())
    sleep_shortly(number)


def batches_are_planned_ahead(number: int, _: Path) -> None:
    embedding = trained()
    for _ in range(8):
        embedding.prefetch(*batch(2000))
    sleep_shortly(number)


def check_exits(interpreters: Interpreters, scene: Scene, count: int, folder: Path) -> None:
    ends = interpreters.run(f"{scene.__module__}.{scene.__name__}(number, folder)", count, folder)
    bad = [end for end in ends if end.status or end.printed]
    assert len(ends) == count
    assert not bad, f"{len(bad)} of {count} exits: {bad[0]}"


def scenes(*all_of_them: Scene) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("scene", all_of_them, ids=lambda scene: scene.__name__)


@scenes(
    a_daemon_trains,
    a_daemon_looks_up,
    a_daemon_prefetches,
    a_daemon_serves,
    a_daemon_saves,
    a_daemon_is_in_the_engine,
    a_reader_follows,
    batches_are_planned_ahead,
)
def test_threads_are_anywhere(
    interpreters: Interpreters, scene: Scene, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Runs each scene four times, or two hundred times in the full suite."""
    check_exits(interpreters, scene, 200 if pytestconfig.getoption("--full") else 4, tmp_path)


# ---- threads that are at a known point when the main thread ends


def slow_down(owner: type, name: str) -> threading.Event:
    """Delays every call of a method by 0.1 seconds; returns an event that is set when a call has begun."""
    held, method = threading.Event(), getattr(owner, name)

    def slow(*arguments: object) -> object:
        held.set()
        time.sleep(0.1)
        return method(*arguments)

    setattr(owner, name, slow)
    return held


def held_in_a_call(_: int, __: Path) -> None:
    """Ends the main thread during a thread's lookup; the lookup and its backward pass still run, the next lookup
    blocks.
    """
    embedding, steps = trained(), []
    held = slow_down(Group, "stage")

    def run() -> None:
        output = embedding(*batch())
        steps.append("forward")
        output.sum().backward()
        steps.append("backward")
        embedding(*batch())
        steps.append("next forward")

    threading.Thread(target=run, daemon=True).start()
    held.wait()
    check_at_exit(lambda: steps == ["forward", "backward"])


def held_between_calls(_: int, __: Path) -> None:
    """Ends the main thread between a thread's lookup and its backward pass, which still runs; the next lookup
    blocks.
    """
    embedding, steps, held = trained(), [], threading.Event()

    def run() -> None:
        output = embedding(*batch())
        held.set()
        time.sleep(0.1)
        output.sum().backward()
        steps.append("backward")
        embedding(*batch())
        steps.append("next forward")

    threading.Thread(target=run, daemon=True).start()
    held.wait()
    check_at_exit(lambda: steps == ["backward"])


def held_in_a_refresh(_: int, folder: Path) -> None:
    embedding = trained()
    Saver().save(embedding, folder)
    reader = TableReader(folder, "t", follow=1e-3)
    held = slow_down(TableReader, "_open")
    last = Path(Saver().save(embedding, folder))
    held.wait()
    check_at_exit(lambda: reader.save == last and not reader._thread.is_alive())


def held_in_planning(_: int, __: Path) -> None:
    embedding, held = trained(), slow_down(Group, "plan")
    embedding.prefetch(*batch())
    held.wait()
    check_at_exit(lambda: not any(thread.is_alive() for thread in embedding.queue._worker._threads))


def used_after_the_threads(_: int, __: Path) -> None:
    """Uses tables at exit, after other threads were stopped: the main thread may still use all functions."""
    embedding = trained()

    def use() -> bool:
        embedding.eval()(*batch())
        embedding.prefetch(*batch())
        return all(Pool("a", 2).map(bool, [1, 2, 3])) and len(embedding.table_ids("t")) > 0

    check_at_exit(use)


@scenes(held_in_a_call, held_between_calls, held_in_a_refresh, held_in_planning, used_after_the_threads)
def test_threads_are_at_one_point(interpreters: Interpreters, scene: Scene, tmp_path: Path) -> None:
    check_exits(interpreters, scene, 1, tmp_path)


# ---- saves that the interpreter waits for


def a_save_in_the_background(_: int, folder: Path) -> None:
    files.before_change = lambda *_: time.sleep(0.01)  # most of the save is not written yet when the main thread ends
    Saver().save(trained(), folder, background=True)


def a_save_at_the_exit(_: int, folder: Path) -> None:
    atexit.register(Saver().save, trained(), folder)


def a_load_at_the_exit(_: int, folder: Path) -> None:
    embedding = trained()
    Saver().save(embedding, folder)
    atexit.register(Saver().load, embedding, folder)


@scenes(a_save_in_the_background, a_save_at_the_exit, a_load_at_the_exit)
def test_saves_are_whole(interpreters: Interpreters, scene: Scene, tmp_path: Path) -> None:
    check_exits(interpreters, scene, 1, tmp_path)
    assert Saver().load(make(), tmp_path) == str(latest_save(tmp_path).resolve())


# ---- threads that the interpreter waits for


def test_an_idle_thread_is_not_waited_for() -> None:
    now, idle, busy = time.monotonic(), exits.CallingThread(), exits.CallingThread()
    idle.last_exit = now - exits.NEXT_CALL_TIMEOUT
    busy.depth = 1
    assert not idle.awaited(now)
    assert busy.awaited(now)
    assert not busy.awaited(now - exits.CALL_TIMEOUT)
    busy.own = True
    assert not busy.awaited(now)
