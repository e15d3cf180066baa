"""Faults of one rank: it dies, does not come, or has a batch or gradients that fail."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from forking import fork
from jagged import jagged
from ranks import Place, Ranks
from sharded_model import Model, Scenario, bags_of, rows, shard
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

import rec_sdk_torch as rst
from rec_sdk_torch.saves.save import job

Start = Callable[[int], Ranks]
TIMEOUT = 4
"""Seconds of the process group, of ranks that fail."""


@pytest.fixture
def doomed(device: torch.device) -> Any:
    """Two ranks of their own, which may be killed."""
    if device.type != "cpu":
        pytest.skip("the timeouts of nccl and hccl are those of their libraries; ids go over gloo on every device")
    ranks = Ranks(2, device.type, TIMEOUT)
    yield ranks
    ranks.kill()


def batch_of(scenario: Scenario, step: int, rank: int, world_size: int) -> Any:
    return jagged(*bags_of(scenario, step, world_size)[rank])


# ---- a process that a rank forks


def fork_a_rank(rank: int, world_size: int) -> tuple[list[str], list[float]]:
    scenario = Scenario()
    model = shard(Model(scenario, 3), scenario, world_size)
    losses, said = [], []
    for step in range(3):
        loss = model(batch_of(scenario, step, rank, world_size))[0]
        if rank == 0 and step == 1:
            batch = batch_of(scenario, 2, rank, world_size)
            work = functools.partial(model, batch), loss.backward, functools.partial(rst.Saver().save, model, "unused")
            said = [fork(each).said() for each in work]
        loss.backward()
        losses.append(loss.item())
    return said, losses


def test_a_process_that_a_rank_forks_takes_no_part(ranks_of: Start, device: torch.device) -> None:
    """It has the sockets of the rank, whose exchanges it would spoil, and none of the threads."""
    if device.type != "cpu":
        pytest.skip("devices do not survive a fork")
    (said, losses), (_, others) = ranks_of(2).run(fork_a_rank)
    assert len(said) == 3
    for each in said:
        assert each.startswith("RuntimeError: process "), each
        assert "forked from a rank" in each
    assert len(losses) == len(others) == 3


# ---- a rank that dies, or does not come


def die_at(rank: int, world_size: int, stage: str) -> str:
    scenario = Scenario(dims=(4, 8, 4))
    model = shard(Model(scenario, 3), scenario, world_size)
    model(batch_of(scenario, 0, rank, world_size))[0].backward()
    exchange = model.module.sparse.exchange
    if rank == 1:
        if stage == "backward":
            model.module.scale.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
        else:
            setattr(exchange.of_ids, stage, lambda *args: os.kill(os.getpid(), signal.SIGKILL))
    try:
        for step in range(1, 4):
            model(batch_of(scenario, step, rank, world_size))[0].backward()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


FULL = pytest.mark.full


@pytest.mark.parametrize(
    "stage",
    [pytest.param("table", marks=FULL), "ask", pytest.param("most", marks=FULL), "backward"],
)
def test_a_rank_that_dies(doomed: Ranks, device: torch.device, stage: str) -> None:
    message = doomed.run_survivors(die_at, stage, survivors=[0])[0]
    if stage != "backward":  # there, it may be DistributedDataParallel's exchange that ends
        assert "rank 0 of 2 could not exchange" in message
        assert "another rank has ended" in message
    assert message != "nothing was raised"  # a rank that hung would not come back: the harness ends it


def raise_early(rank: int, world_size: int) -> tuple[int, str]:
    scenario = Scenario()
    model = shard(Model(scenario, 3), scenario, world_size)
    dense = torch.optim.SGD([model.module.scale], lr=0.05)
    pipeline: Any = rst.EmbCacheTrainPipelineSparseDist(model, dense, "cpu", Place.device, depth=0)

    def read() -> Any:
        for step in range(4):
            yield batch_of(scenario, step, rank, world_size)
        if rank == 1:
            raise OSError("the disk")
        yield batch_of(scenario, 4, rank, world_size)

    batches = read()
    for step in range(10):
        try:
            pipeline.progress(batches)
        except OSError as error:
            return step, str(error)
        except RuntimeError as error:
            return step, str(error)
    raise AssertionError


def test_a_rank_whose_data_raises(doomed: Ranks) -> None:
    (steps, message), other = doomed.run(raise_early)
    assert other == (4, "the disk")
    assert steps <= 4
    assert "rank 0 of 2 could not exchange" in message
    assert "has not come within the process group's timeout" in message


class Collections(torch.nn.Module):
    """Each exchanges by itself."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(Model(Scenario(), seed) for seed in range(count))

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack([part(batch)[0] for part in self.parts]).sum(), batch.values()


def uneven_in_torchrecs_pipeline(
    rank: int, world_size: int, collections: int, one_group: bool, counts: tuple[int, int]
) -> Any:
    scenario = Scenario()
    model = shard(Collections(collections), scenario, world_size, one_group)
    dense = torch.optim.SGD([part.scale for part in model.module.parts], lr=0.05)
    pipeline: Any = TrainPipelineSparseDist(model, dense, Place.device)
    batches = (batch_of(scenario, step, rank, world_size) for step in range(counts[rank]))
    for step in range(10):
        try:
            pipeline.progress(batches)
        except RuntimeError as error:
            return step, str(error)
        except StopIteration:
            return step, ""
    raise AssertionError


@pytest.mark.parametrize(("collections", "one_group"), [(1, False), pytest.param(2, False, marks=FULL), (2, True)])
@pytest.mark.parametrize("counts", [(6, 4), pytest.param((4, 6), marks=FULL)])
def test_data_that_ends_early_in_torchrecs_pipeline(
    doomed: Ranks, counts: tuple[int, int], collections: int, one_group: bool
) -> None:
    """It asks for a batch's ids one step ahead, so the last batch that all ranks have is not trained either."""
    for steps, message in doomed.run(uneven_in_torchrecs_pipeline, collections, one_group, counts):
        assert steps == min(counts) - 1
        assert "of 2 could not exchange" in message
        assert "has not come within the process group's timeout" in message


# ---- saves and state dicts without a rank


def leave_others(rank: int, world_size: int, path: str) -> list[str]:
    """Returns what saves and gathered state dicts raise on rank 0: rank 1 takes part in each once, then no more."""
    scenario = Scenario()
    model = shard(Model(scenario, 3), scenario, world_size)
    model(batch_of(scenario, 0, rank, world_size))[0].backward()
    saver, whole = rst.Saver(), {"sparse.embedding_bags.t1.weight": torch.empty(31, 4)}
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    gather: Any = functools.partial(rst.state_dict_gather, model.state_dict(), whole)
    get: Any = functools.partial(get_model_state_dict, model.module, options=full)
    for call in (gather, get, functools.partial(saver.save, model, path)):
        call()
    done = Path(path, "done")
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(job, "write", lambda moment: wait_for(done))
        future = saver.save(model, path, background=True)
        calls = [gather, get, future.result, functools.partial(saver.load, model, path)] if rank == 0 else []
        with ThreadPoolExecutor(4) as together:  # so that they wait for the timeout at the same time
            messages = list(together.map(error_of, calls))
        if rank == 0:
            done.touch()
        error_of(future.result)
    return [*messages, *sorted(os.listdir(path))]


def wait_for(file: Path) -> None:
    for _ in range(100 * TIMEOUT):  # of which it needs 20
        if file.exists():
            return
        time.sleep(0.1)


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_a_rank_that_takes_no_part_in_a_save(doomed: Ranks, tmp_path: Path) -> None:
    """Others wait for the timeout of the process group, and say which rank exchanges what."""
    found = doomed.run(leave_others, str(tmp_path))[0]
    exchanges = [
        "how many rows of sparse.embedding_bags.t1.weight each rank has",
        "the rows of table 't0' for a full state dict",
        "what each rank has written of a save",
        "which save is loaded",
    ]
    for message, what in zip(found, exchanges, strict=False):
        assert message.startswith(f"RuntimeError: rank 0 of 2 could not exchange {what}: another rank has ended"), found
    saves = [name for name in found[4:] if rst.Saver.is_timestamp_format(name)]
    assert len(saves) == 1, "the save that failed has left no folder"


# ---- a batch that fails


def fail_in_the_middle(rank: int, world_size: int, depth: int, kind: str) -> Any:
    scenario = Scenario(optimizer=torch.optim.Adagrad, cache=40, seed=31)
    model = shard(Model(scenario, 3), scenario, world_size)
    dense = torch.optim.SGD([model.module.scale], lr=0.05)
    pipeline: Any = rst.EmbCacheTrainPipelineSparseDist(model, dense, "cpu", Place.device, depth=depth)

    def batches() -> Any:
        for step in range(5):
            yield batch_of(scenario, step, rank, world_size)
            if step == 1 and kind != "none":
                wide = {key: [list(range(0, 200, 2))] for key in ("f0", "f1", "f2", "f3")}  # too much for rank 0
                bad = {"lacking": jagged({"f0": [[1]]}), "wide": jagged(wide)}[kind]
                yield bad if rank == 1 else batch_of(scenario, 7, rank, world_size)

    source, seen, steps = batches(), [], 0
    while True:
        try:
            pipeline.progress(source)
            steps += 1
        except StopIteration:
            return seen, steps, rows(model.module.sparse)
        except Exception as error:
            seen.append((steps, f"{type(error).__name__}: {error}"))


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("kind", ["lacking", "wide"])
def test_a_batch_that_fails_in_a_pipeline(ranks_of: Start, depth: int, kind: str) -> None:
    first, second = ranks_of(2).run(fail_in_the_middle, depth, kind)
    assert first[:2] == second[:2]
    ((step, message),) = first[0]
    assert step == 2
    assert ("lacks features" if kind == "lacking" else "CacheTooSmallError") in message
    assert first[1] == 5
    without = ranks_of(2).run(fail_in_the_middle, 0, "none")
    for mine, its in zip((first, second), without, strict=True):
        for table, expected in its[2].items():
            for i, row in expected.items():
                found = mine[2][table][i]
                both = min(len(row), len(found))  # states of a row that was not looked up are kept, or not
                assert torch.equal(found[:both], row[:both]), (table, i)
                assert not found[both:].any()


class TwoArgumentsError(Exception):
    """Its constructor does not take its args, so that pickle cannot make it again."""

    def __init__(self, table: str, rows: int) -> None:
        super().__init__(f"table {table} has {rows} rows")


def raise_on_the_last(rank: int, world_size: int) -> str:
    scenario = Scenario()
    exchange = shard(Model(scenario, 3), scenario, world_size).module.sparse.exchange
    try:
        exchange.raise_together(TwoArgumentsError("t", 3) if rank == world_size - 1 else None)
    except RuntimeError as error:
        return str(error)
    raise AssertionError


def test_an_error_that_pickle_cannot_make_again(ranks_of: Start) -> None:
    assert ranks_of(2).run(raise_on_the_last) == ["TwoArgumentsError: table t has 3 rows"] * 2


# ---- gradients


def one_nan(rank: int, world_size: int, guard: str) -> Any:
    scenario = Scenario(optimizer=torch.optim.Adagrad, cache=1.0)
    origin = Model(scenario, 3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    if guard == "scaler":
        origin.sparse.set_grad_scaler(scaler)
    else:
        embedding = origin.sparse.embedding
        embedding._set_options(check_finite=guard)
    model = shard(origin, scenario, world_size)
    sparse = model.module.sparse
    # Odd ids are of rank 1, which is the only one to have a NaN, for an id of its own.
    bags = {key: [[2 * i + rank] for i in range(3)] for key in ("f0", "f1", "f2", "f3")}

    def step(bad: bool) -> str:
        loss, _ = model.module(jagged(bags))  # DistributedDataParallel ends with an error in a backward pass
        try:
            (loss * (float("nan") if bad else scaler.get_scale() if guard == "scaler" else 1.0)).backward()
        except FloatingPointError as error:
            return str(error)
        return ""

    step(False)
    before = rows(sparse)
    raised = step(rank == 1)
    unchanged = all(torch.equal(row, before[t][i]) for t, of in rows(sparse).items() for i, row in of.items())
    after = step(False)
    changed = any(not torch.equal(row, before[t][i]) for t, of in rows(sparse).items() for i, row in of.items())
    return raised, unchanged, after, changed, sparse.home.skipped_updates


@pytest.mark.parametrize("guard", ["raise", "scaler"])
def test_a_nan_of_one_rank(ranks_of: Start, guard: str) -> None:
    results = ranks_of(2).run(one_nan, guard)
    for raised, unchanged, after, changed, skipped in results:
        assert raised == results[0][0], "all raise the same error"
        assert ("NaN or infinite" in raised) == (guard == "raise")
        assert unchanged, "no rank changes rows"
        assert (after, changed) == ("", True), "and all can go on"
        assert skipped == (guard == "scaler")


def read_twice(rank: int, world_size: int) -> list[str]:
    """The errors of a batch that is too much for the cache of rank 0, whose outputs are asked for twice."""
    model, seen = shard(Model(Scenario(cache=8), 0), Scenario(), world_size), []
    outputs = model.module.sparse(jagged({key: [list(range(0, 200, 2))] for key in ("f0", "f1", "f2", "f3")}))
    for _ in range(2):
        try:
            outputs.wait()
        except Exception as error:
            seen.append(f"{type(error).__name__}: {error}")
    return seen


def test_outputs_of_a_batch_that_failed_are_never_read(ranks_of: Start) -> None:
    for seen in ranks_of(2).run(read_twice):
        assert len(seen) == 2
        assert seen[0] == seen[1]
        assert seen[0].startswith("CacheTooSmallError")
