"""Processes of a group that stay, and do one task after another: over gloo, or each on a device of its own."""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import forked_python
import pytest
import torch

TIMEOUT = 90
"""Seconds for one task; then the processes are killed."""


BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


class Place:
    """The place of this process among the ranks.

    Attributes:
        device: where its models are.
        rank: its number, 0 in a process without a group.
        world_size: the number of ranks.
    """

    device = torch.device("cpu")
    rank = 0
    world_size = 1


def _serve(rank: int, world_size: int, port: int, kind: str, timeout: float, paths: list[str], pipe: Any) -> None:
    sys.path[:0] = paths
    torch.set_num_threads(1)
    Place.rank, Place.world_size = rank, world_size
    if kind != "cpu":
        import rec_sdk_torch  # noqa: F401  finds torch_npu

        Place.device = torch.device(kind, rank)
        torch.get_device_module(kind).set_device(Place.device)
    torch.distributed.init_process_group(
        BACKENDS[kind],
        init_method=f"tcp://localhost:{port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    while True:
        task = pipe.recv()
        if task is None:
            break
        function, args = task
        try:
            pipe.send((True, function(rank, world_size, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    torch.distributed.destroy_process_group()
    gc.collect()  # models, which hold the groups and so their threads: none may live while the interpreter ends


class Ranks:
    """`world_size` processes."""

    def __init__(self, world_size: int, kind: str = "cpu", timeout: float = TIMEOUT) -> None:
        """`kind`: of device. `timeout`: seconds, of the process groups."""
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        here = Path(__file__).parent
        paths = [str(here), str(here.parent)]
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = forked_python.CONTEXT.Pipe()
            process = forked_python.CONTEXT.Process(
                target=_serve, args=(rank, world_size, port, kind, timeout, paths, theirs), daemon=True
            )
            process.start()
            theirs.close()  # so that the end of a process is seen
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The results of `function(rank, world_size, *args)` on each rank; raises what a rank raises."""
        for pipe in self._pipes:
            pipe.send((function, args))
        results = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(TIMEOUT):
                self.kill()
                raise TimeoutError(f"rank {rank} has not answered for {TIMEOUT} s")
            results.append(pipe.recv())
        wrong = [f"rank {rank}:\n{text}" for rank, (fine, text) in enumerate(results) if not fine]
        if wrong:
            raise AssertionError("\n".join(wrong))
        return [result for _, result in results]

    def run_survivors(self, function: Callable[..., Any], *args: Any, survivors: Sequence[int]) -> list[Any]:
        """The same where the other ranks die of it."""
        for pipe in self._pipes:
            pipe.send((function, args))
        results = []
        for rank in survivors:
            assert self._pipes[rank].poll(TIMEOUT), f"rank {rank} hangs"
            fine, result = self._pipes[rank].recv()
            assert fine, result
            results.append(result)
        dead = []
        for rank in set(range(len(self._processes))) - set(survivors):
            self._processes[rank].join(TIMEOUT)  # its sockets close, which survivors see, before it has an exit code
            dead.append(self._processes[rank].exitcode)
        assert all(code is not None and code < 0 for code in dead), f"exit codes {dead}"
        return results

    def alive(self) -> bool:
        """Whether all processes are."""
        return all(process.is_alive() for process in self._processes)

    def kill(self) -> None:
        """Ends the processes, whatever they are at. None is alive when this returns."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def close(self) -> None:
        """Lets the processes end."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                pipe.send(None)
        for process in self._processes:
            process.join(10)
        self.kill()


Start = Callable[[int], Ranks]
"""The fixture `ranks_of`: the processes of a world size."""


def error_of(call: Callable[[], object]) -> str:
    """The class and message of what a call raises; "" where it raises nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def on_ranks(*world_sizes: int) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Makes a test of a function that each of so many ranks calls; all have to return the same.

    The function has `rank` and `world_size` where it names them; its other parameters are the test's. Without numbers
    here, `world_size` is one of those that the test is parametrized by.
    """

    def decorate(body: Callable[..., object]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(ranks_of: Start, world_size: int, **arguments: Any) -> None:
            first, *others = ranks_of(world_size).run(_call, body.__module__, body.__name__, arguments)
            assert all(other == first for other in others), (first, *others)

        own = [each for name, each in inspect.signature(body).parameters.items() if name not in ("rank", "world_size")]
        given = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("ranks_of", "world_size")]
        own = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]
        test.__signature__ = inspect.Signature([*given, *own])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world_size", world_sizes)(test) if world_sizes else test

    return decorate


def _call(rank: int, world_size: int, module: str, name: str, arguments: dict[str, Any]) -> Any:
    """Calls the function of which `on_ranks` made a test."""
    body = getattr(importlib.import_module(module), name).__wrapped__
    place = {"rank": rank, "world_size": world_size}
    return body(**{each: place[each] for each in inspect.signature(body).parameters if each in place}, **arguments)
