"""Forked processes do not change what they share with their parent, and no process hangs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import embeddings
import pytest
import torch
from embeddings import ADAGRAD, one_table, weights_of
from forking import fork, sleeping_child

from rec_sdk_torch.tbe import TableBatchedEmbedding

DIM = 4


@pytest.fixture(autouse=True, scope="module")
def _on_the_host(request: pytest.FixtureRequest) -> None:
    """Skips if torch refuses a backward pass in a forked process.

    A CUDA build of torch may have started a device's threads in an earlier test, even without a GPU.
    """
    if (
        request.config.getoption("--device") != "cpu"
        or fork(torch.ones((), requires_grad=True).backward).result() != "None"
    ):
        pytest.skip("torch refuses a backward pass in a process that is forked from one with a device's threads")


def make(folder: Path | None) -> TableBatchedEmbedding:
    return one_table(None, rows=1000, optimizer=ADAGRAD, cache=8, seed=3, host_store=folder)


def train(embedding: TableBatchedEmbedding) -> None:
    embeddings.train(embedding, *torch.arange(64).split(8), bag=1, square=True)


def weights(embedding: TableBatchedEmbedding) -> torch.Tensor:
    return weights_of(embedding, range(64))


def read(embedding: TableBatchedEmbedding) -> None:
    with torch.no_grad():
        embedding(torch.arange(8), torch.arange(9))


CALLS: dict[str, Callable[[TableBatchedEmbedding], object]] = {
    "train": train,
    "read": read,
    "eval": lambda embedding: read(embedding.eval()),
    "view": weights,
    "write": lambda embedding: embedding.view("t").write(torch.arange(2), {"weight": torch.zeros(2, DIM)}),
    "remove": lambda embedding: embedding.view("t").remove(torch.arange(2)),
    "evict": lambda embedding: embedding.view("t").evict(),
    "state_dict": lambda embedding: embedding.state_dict(),
    "load_state_dict": lambda embedding: embedding.load_state_dict(make(None).state_dict()),
    "stats": lambda embedding: embedding.cache_stats(),
    "memory": lambda embedding: embedding.memory_report("t"),
}


def errors_of_calls(embedding: TableBatchedEmbedding) -> list[str]:
    """Returns the type and message of the error that each of `CALLS` raises in a newly forked process."""

    def errors() -> str:
        found = []
        for call in CALLS.values():
            try:
                call(embedding)
                found.append("nothing")
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
        return "\0".join(found)

    return fork(errors).result().split("\0")


def test_rows_on_disk_are_refused_in_a_child(tmp_path: Path) -> None:
    embedding = make(tmp_path)
    train(embedding)
    before = weights(embedding)
    for said in errors_of_calls(embedding):
        assert said.startswith("RuntimeError: process "), said
        assert f"forked from process {os.getpid()}" in said
        assert f"host_store {str(tmp_path)!r}" in said
    assert torch.equal(weights(embedding), before)
    train(embedding)


def test_a_backward_pass_of_the_parents_forward_is_refused_too(tmp_path: Path) -> None:
    embedding = make(tmp_path)
    train(embedding)
    output = embedding(torch.arange(8), torch.arange(9))
    before = weights(embedding)
    assert "host_store" in fork(lambda: output.sum().backward()).result()
    assert torch.equal(weights(embedding), before)
    output.sum().backward()


def test_a_child_that_prefetched_may_forget_and_end(tmp_path: Path) -> None:
    embedding = make(tmp_path)
    train(embedding)
    prefetched = embedding.prefetch(torch.arange(8), torch.arange(9))
    assert fork(lambda: embedding.forget(prefetched)).result() == "None"
    assert "host_store" in fork(lambda: embedding.prefetch(torch.arange(8), torch.arange(9))).result()


def test_a_child_may_use_its_own_tables(tmp_path: Path) -> None:
    embedding, unused = make(tmp_path / "a"), make(tmp_path / "b")
    train(embedding)
    assert fork(lambda: train(make(tmp_path / "c"))).result() == "None"
    assert fork(lambda: train(unused)).result() == "None", "no rows were there when it was forked"
    assert "FolderInUseError" in fork(lambda: train(make(tmp_path / "a"))).result()


def test_rows_in_memory_are_a_copy() -> None:
    embedding = make(None)
    train(embedding)
    before = weights(embedding)

    def go_on() -> bool:
        train(embedding)
        embedding.prefetch(torch.arange(8), torch.arange(9))
        embedding.queue.wait()
        planned = embedding.queue._queued[0].plans is not None
        train(embedding)
        return planned and not torch.equal(weights(embedding), before)

    assert fork(go_on).result() == "True"
    assert torch.equal(weights(embedding), before)


def test_a_fork_during_another_threads_call_is_reported() -> None:
    embedding = make(None)
    train(embedding)
    working, go_on = threading.Event(), threading.Event()

    def work() -> None:
        with embedding.exclusive():
            working.set()
            go_on.wait()

    thread = threading.Thread(target=work)
    thread.start()
    working.wait()
    errors = errors_of_calls(embedding)
    go_on.set()
    thread.join()
    for each in errors:
        assert each.startswith("RuntimeError: process ")
        assert "while another thread worked on these tables" in each
    with embedding.exclusive():
        child = fork(lambda: train(embedding))
    assert child.result() == "None", "this thread has them, and goes on in the child"


def test_a_fork_during_planning_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = make(None)
    train(embedding)
    reading, go_on = threading.Event(), threading.Event()

    def read_ahead(plan: object) -> None:
        reading.set()
        go_on.wait()

    monkeypatch.setattr(embedding.groups[0], "read_ahead", read_ahead)
    embedding.prefetch(torch.arange(100, 108), torch.arange(9))
    reading.wait()
    result = fork(lambda: read(embedding)).result()
    go_on.set()
    embedding.queue.wait()
    assert "while another thread worked on these tables" in result
    embedding.forget()
    assert fork(lambda: train(embedding)).result() == "None"


def test_children_that_live_on_keep_no_folder_locked(tmp_path: Path) -> None:
    embedding = make(tmp_path)
    train(embedding)
    with sleeping_child():
        del embedding
        train(make(tmp_path))


def test_a_folder_lock_is_released_although_a_child_inherited_it(tmp_path: Path) -> None:
    embedding = make(tmp_path)
    train(embedding)
    (lock,) = (fd for fd in Path("/proc/self/fd").iterdir() if fd.exists() and fd.samefile(tmp_path / ".lock"))
    child_has = os.dup(int(lock.name))
    del embedding
    train(make(tmp_path))
    os.close(child_has)


def test_a_child_that_outlives_its_parent_keeps_no_folder_locked(tmp_path: Path) -> None:
    running, go_on = os.pipe(), os.pipe()

    def live_on() -> None:
        os.write(running[1], b".")
        os.read(go_on[0], 1)

    def have_a_child() -> None:
        embedding = make(tmp_path)
        train(embedding)
        fork(live_on)
        signal.pause()

    parent = fork(have_a_child)
    os.read(running[0], 1)
    parent.kill()
    train(make(tmp_path))
    os.write(go_on[1], b".")
    for descriptor in (*running, *go_on):
        os.close(descriptor)


def test_the_error_in_a_grandchild_names_the_owning_process(tmp_path: Path) -> None:
    embedding = make(tmp_path)
    train(embedding)
    result = fork(lambda: fork(lambda: read(embedding)).result()).result()
    assert f"forked from process {os.getpid()}" in result
