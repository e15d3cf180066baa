"""Runs functions on ranks: processes that stay alive between tests.

They communicate over gloo, or use one device each.
"""

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
"""Seconds for one task, after which the processes are killed."""


BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


class Place:
    """The rank of this process, and its device.

    Attributes:
        device: device of the rank's models.
        rank: rank of the process; 0 without a process group.
        world_size: number of ranks.
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
    gc.collect()  # models keep process groups and their threads alive; none may remain at interpreter exit


class Ranks:
    """The `world_size` processes of a process group. They execute functions one after another."""

    def __init__(self, world_size: int, kind: str = "cpu", timeout: float = TIMEOUT) -> None:
        """Starts the processes; `kind` is the device type, `timeout` the process groups' timeout in seconds."""
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
            theirs.close()  # otherwise the end of a process would go unnoticed
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs `function(rank, world_size, *args)` on each rank; returns the ranks' results, or raises the
        error of a rank.
        """
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
        """Runs a function that kills the ranks that are not in `survivors`; returns the results of the survivors."""
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
            # Survivors may report the closed sockets before the killed process has an exit code.
            self._processes[rank].join(TIMEOUT)
            dead.append(self._processes[rank].exitcode)
        assert all(code is not None and code < 0 for code in dead), f"exit codes {dead}"
        return results

    def alive(self) -> bool:
        """Returns whether all processes are alive."""
        return all(process.is_alive() for process in self._processes)

    def kill(self) -> None:
        """Kills the processes, whatever they are doing; returns when all have ended."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def close(self) -> None:
        """Ends the processes after their current function."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                pipe.send(None)
        for process in self._processes:
            process.join(10)
        self.kill()


Start = Callable[[int], Ranks]
"""The fixture `ranks_of`: the processes of a world size."""


def error_of(call: Callable[[], object]) -> str:
    """Returns the class and message of the exception that the call raises; "" if it raises none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def on_ranks(*world_sizes: int) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Makes a test from a function that is called on each rank; all ranks must return the same value.

    The function receives `rank` and `world_size` if it has such parameters; its other parameters are the test's.
    Without world sizes as arguments here, `world_size` is a parameter of the test.
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
    """Calls the function that `on_ranks` has turned into a test."""
    body = getattr(importlib.import_module(module), name).__wrapped__
    place = {"rank": rank, "world_size": world_size}
    return body(**{each: place[each] for each in inspect.signature(body).parameters if each in place}, **arguments)
