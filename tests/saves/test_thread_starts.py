"""Threads that cannot start, or lack memory for their results, raise an error and leave no lock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tables import assert_same, loaded, save, train, trained

from rec_sdk_torch import Saver
from rec_sdk_torch.runtime.exits import OwnThread, _own
from rec_sdk_torch.runtime.worker import Pool
from rec_sdk_torch.saves.format import tensors
from rec_sdk_torch.saves.format.manifest import read_manifest
from rec_sdk_torch.saves.load.save_reader import verify_files

START = "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread"
start = getattr(threading, START)


def start_and_end(function: Callable[[], object], *others: Any, **options: Any) -> Any:
    """Starts a thread; a thread of this package ends before running Python, as without memory for a frame."""
    thread = getattr(getattr(function, "func", function), "__self__", None)
    return start(int if isinstance(thread, OwnThread) else function, *others, **options)


def fail(*_: object) -> None:
    raise MemoryError


@pytest.fixture(params=["before Python", "before its work"])
def no_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Makes threads of this package end early, until it is undone."""
    if request.param == "before Python":
        monkeypatch.setattr(threading, START, start_and_end)
    else:
        monkeypatch.setattr(OwnThread, "run", fail)
    return monkeypatch


def within(seconds: float, work: Callable[[], object]) -> Any:
    """Returns the result or the error of a call; None if it hangs."""
    outcome: list[Any] = []

    def call() -> None:
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0] if outcome else None


ENDS = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@ENDS
def test_a_thread_that_cannot_begin(no_threads: pytest.MonkeyPatch) -> None:
    before = set(_own), set(threading.enumerate())
    thread = OwnThread(lambda: None, stop=lambda: None)
    assert "no memory to start" in str(within(30, thread.start))
    assert not thread.is_alive()
    assert (set(_own), set(threading.enumerate())) == before


@ENDS
@pytest.mark.parametrize("background", [False, True])
def test_a_save_whose_threads_cannot_begin(background: bool, tmp_path: Path, no_threads: pytest.MonkeyPatch) -> None:
    """The save raises and leaves no lock: training continues, and a later save succeeds."""
    source, saver = trained(2), Saver()
    assert isinstance(within(30, partial(saver.save, source, tmp_path, background=background)), MemoryError)
    no_threads.undo()
    train(source, range(2, 4))
    assert isinstance(within(60, partial(saver.save, source, tmp_path)), str)
    assert_same(loaded(tmp_path), source)


def test_checksums_whose_threads_cannot_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(trained(2), tmp_path)
    monkeypatch.setattr(tensors, "_CHUNK_BYTES", 16)
    monkeypatch.setattr(tensors, "_ONE_READER", 16)
    monkeypatch.setattr(threading, START, start_and_end)
    chain = [(folder, read_manifest(folder))]
    assert isinstance(within(30, lambda: verify_files(chain) or "right"), MemoryError)


@pytest.mark.parametrize("call", ["set_running_or_notify_cancel", "set_result"])
def test_a_task_without_memory_ends_by_an_error(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller does not wait forever, and later tasks run."""
    with Pool("test") as pool:
        assert pool.submit(int, "7").result(30) == 7
        with monkeypatch.context() as patch:
            patch.setattr(Future, call, fail)
            future = pool.submit(int, "8")
            with pytest.raises(MemoryError):
                future.result(30)
        assert pool.submit(int, "9").result(30) == 9
