"""Ranks whose data ends at different steps stop together; a fault of one rank raises an error on all ranks.

A faulty rank dies, misses an exchange, or has an invalid batch or invalid gradients.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import jagged
from forking import fork
from ranks import Place, Ranks, Start, error_of, on_ranks
from sharded_model import (
    KEYS,
    Model,
    Scenario,
    assert_rows,
    assert_same,
    batch_of,
    batches_of,
    rows,
    shard,
    sharded,
    train,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from training import differing_tensors

import rec_sdk_torch as rst
from rec_sdk_torch.distributed import all_to_all
from rec_sdk_torch.saves.save import job

PLAIN = Scenario()
TIMEOUT = 4
"""The timeout, in seconds, of the process group of ranks that fail."""


def start_killable_ranks(device: torch.device, count: int) -> Iterator[Ranks]:
    """Starts separate processes, so that a test may kill a rank."""
    if device.type != "cpu":
        pytest.skip("nccl and hccl set their own timeouts; ids go over gloo on every device")
    ranks = Ranks(count, device.type, TIMEOUT)
    yield ranks
    ranks.kill()


@pytest.fixture
def killable_ranks(device: torch.device) -> Iterator[Ranks]:
    yield from start_killable_ranks(device, 2)


@pytest.fixture
def four_killable_ranks(device: torch.device) -> Iterator[Ranks]:
    yield from start_killable_ranks(device, 4)


class Collections(torch.nn.Module):
    """A model with several collections, each with its own exchange."""

    def __init__(self, count: int, scenario: Scenario = PLAIN) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(Model(scenario, seed) for seed in range(count))

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack([part(batch)[0] for part in self.parts]).sum(), batch.values()


# ---- data that ends at different steps: all ranks stop after the shortest rank's last batch


BATCHES = {2: (6, 4), 4: (5, 7, 3, 4)}
EPOCHS = 2
NAMED = {"one": (1,), "turned": (1, 0)}
"""Indices of the collections that a loop prefetches, in order."""


def pipelined(model: Any, dense: Any, kind: str, depth: int) -> Callable[[Iterator[Any]], int]:
    if kind in ("loop", *NAMED):

        def loop(batches: Iterator[Any]) -> int:
            steps = 0
            names = NAMED.get(kind)
            features = None if names is None else lambda batch: {f"parts.{name}.sparse": batch for name in names}
            for batch in rst.prefetch(batches, model.module, depth=depth, features=features):
                dense.zero_grad()
                model(batch)[0].backward()
                dense.step()
                steps += 1
            return steps

        return loop
    if kind == "hybrid":
        pipeline: Any = rst.HybridTrainPipelineSparseDist(model, dense, Place.device, pipe_n_batch=depth)
    else:
        pipeline = rst.EmbCacheTrainPipelineSparseDist(
            model, dense, "cpu", Place.device, depth=depth, execute_all_batches=kind == "all"
        )

    def progress(batches: Iterator[Any]) -> int:
        steps = 0
        while True:
            try:
                pipeline.progress(batches)
            except StopIteration:
                return steps
            steps += 1

    return progress


def train_epochs(rank: int, world_size: int, kind: str, depth: int, counts: tuple[int, ...]) -> Any:
    """Trains several epochs; returns (steps of each epoch, rows)."""
    scenario = Scenario(optimizer=torch.optim.Adagrad, rules={"admit_threshold": 2}, seed=51)
    model: Any = shard(Collections(2, scenario), scenario)
    parts = model.module.parts
    epoch_of = pipelined(model, torch.optim.SGD([part.scale for part in parts], lr=0.05), kind, depth)
    steps = [epoch_of(batch_of(scenario, 10 * epoch + i) for i in range(counts[rank])) for epoch in range(EPOCHS)]
    return steps, [rows(part.sparse) for part in parts]


def check(ranks: Ranks, kind: str, depth: int, counts: tuple[int, ...], even: Any = None) -> None:
    """Checks that ranks stop after the shortest rank's batches, and compares rows with `even`.

    `even` are the results of a run in which every rank has that many batches.
    """
    results = ranks.run(train_epochs, kind, depth, counts)
    assert [steps for steps, _ in results] == [[min(counts)] * EPOCHS] * len(counts)
    if even is not None:
        assert_same([found for _, found in results], [found for _, found in even])


@pytest.mark.parametrize("world_size", BATCHES)
def test_ranks_train_the_batches_that_all_have(ranks_of: Start, pytestconfig: pytest.Config, world_size: int) -> None:
    """Outside the full suite, two ranks run half of the pipelines and depths, and four ranks run a quarter."""
    counts, ranks = BATCHES[world_size], ranks_of(world_size)
    kinds = [*((kind, depth) for kind in ("all", "loop") for depth in range(4)), ("hybrid", 2)]
    named = [(kind, 2) for kind in NAMED]
    full = pytestconfig.getoption("--full")
    even = ranks.run(train_epochs, "loop", 0, (min(counts),) * world_size)
    for kind, depth in [*kinds, *named] if full else {2: [*kinds[::2], *named], 4: kinds[3::4]}[world_size]:
        check(ranks, kind, depth, counts, even)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_batches_read_ahead_are_dropped_at_the_end(ranks_of: Start, depth: int) -> None:
    for counts in ((6, 4), (4, 6), (4, 4)) if depth == 1 else ((6, 4),):
        results = ranks_of(2).run(train_epochs, "ahead", depth, counts)
        assert [steps for steps, _ in results] == [[4 - depth] * EPOCHS] * 2


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("counts", [(0, 3), (1, 0), (0, 0), (3, 1)])
def test_fewer_batches_than_the_prefetch_depth(ranks_of: Start, counts: tuple[int, int], depth: int) -> None:
    check(ranks_of(2), "all", depth, counts)


@on_ranks(2)
@pytest.mark.parametrize("depth", [0, 2])
def test_an_untrained_bad_batch_does_not_raise(rank: int, depth: int) -> None:
    """Rank 1's third batch is invalid but is not trained, because rank 0 has only two batches."""
    model = sharded(Scenario())
    dense = torch.optim.SGD([model.module.scale], lr=0.05)
    good = list(batches_of(Scenario(), 2))
    assert pipelined(model, dense, "all", depth)(iter([*good, jagged({"f0": [[1]]})] if rank else good)) == 2


# ---- a process that a rank forks


def fork_a_rank(rank: int, world_size: int) -> list[str]:
    model = train(sharded(PLAIN), PLAIN, range(1))
    loss, errors = model(batch_of(PLAIN, 1))[0], []
    if rank == 0:
        batch = batch_of(PLAIN, 2)
        work = functools.partial(model, batch), loss.backward, functools.partial(rst.Saver().save, model, "unused")
        errors = [fork(each).result() for each in work]
    loss.backward()
    train(model, PLAIN, range(2, 3))
    return errors


def test_a_process_forked_by_a_rank_is_no_rank(ranks_of: Start, device: torch.device) -> None:
    """The child inherits the rank's sockets, so it could corrupt exchanges, but none of the rank's threads."""
    if device.type != "cpu":
        pytest.skip("devices do not survive a fork")
    errors, _ = ranks_of(2).run(fork_a_rank)
    assert len(errors) == 3
    for each in errors:
        assert each.startswith("RuntimeError: process "), each
        assert "forked from a rank" in each


# ---- a rank that dies or misses an exchange


def die_at(rank: int, world_size: int, stage: str, local_size: int | None = None) -> str:
    """Kills the last rank at `stage`; returns this rank's error on the other ranks."""
    scenario = Scenario(dims=(4, 8, 4), local_size=local_size)
    with pytest.MonkeyPatch.context() as patch:
        if stage == "to_owners":  # in shared memory, ids are sent with their numbers
            patch.setattr(all_to_all, "connect", lambda group: None)
        model = train(sharded(scenario), scenario, range(1))
    if rank == world_size - 1:
        if stage == "backward":
            model.module.scale.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
        else:
            ids = model.module.sparse.exchange.ids_all_to_all
            setattr(ids, stage, lambda *args: os.kill(os.getpid(), signal.SIGKILL))
    return error_of(lambda: train(model, scenario, range(1, 4)))


FULL = pytest.mark.full


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param("exchange_counts", marks=FULL),
        "to_owners",
        pytest.param("all_reduce_max", marks=FULL),
        "backward",
    ],
)
def test_the_death_of_a_rank_is_an_error_on_the_others(killable_ranks: Ranks, stage: str) -> None:
    (message,) = killable_ranks.run_survivors(die_at, stage, survivors=[0])
    if stage != "backward":  # in a backward pass, DistributedDataParallel's exchange may fail first
        assert "rank 0 of 2 could not exchange" in message
        assert "another rank has ended" in message
    assert message.startswith("RuntimeError")  # a rank that hangs would fail in the test harness instead


@FULL
def test_the_death_of_a_rank_is_an_error_on_all_machines(four_killable_ranks: Ranks) -> None:
    """Rank 0 exchanges nothing with rank 3, which is on another machine.

    It waits, up to the timeout, for ranks that do exchange with rank 3.
    """
    for rank, message in enumerate(four_killable_ranks.run_survivors(die_at, "to_owners", 2, survivors=[0, 1, 2])):
        assert f"rank {rank} of 4 could not exchange" in message


def progress_until_error(pipeline: Any, batches: Any) -> tuple[int, str]:
    """Returns the number of the step that raises, and the error message."""
    for step in range(10):
        try:
            pipeline.progress(batches)
        except (OSError, RuntimeError, StopIteration) as error:
            return step, str(error)
    raise AssertionError


def pipeline_of(model: Any, depth: int) -> Any:
    dense = torch.optim.SGD([model.module.scale], lr=0.05)
    return rst.EmbCacheTrainPipelineSparseDist(model, dense, "cpu", Place.device, depth=depth)


def raise_early(rank: int, world_size: int) -> tuple[int, str]:
    def read() -> Any:
        yield from batches_of(PLAIN, 4)
        if rank == 1:
            raise OSError("the disk")
        yield batch_of(PLAIN, 4)

    return progress_until_error(pipeline_of(sharded(PLAIN), 0), read())


def test_an_error_in_the_data_of_one_rank(killable_ranks: Ranks) -> None:
    (steps, message), other = killable_ranks.run(raise_early)
    assert other == (4, "the disk")
    assert steps <= 4
    assert "rank 0 of 2 could not exchange" in message
    assert "has not taken part within the process group's timeout" in message


def uneven_in_torchrecs_pipeline(
    rank: int, world_size: int, collections: int, one_group: bool, counts: tuple[int, int]
) -> Any:
    model: Any = shard(Collections(collections), PLAIN, one_group)
    dense = torch.optim.SGD([part.scale for part in model.module.parts], lr=0.05)
    return progress_until_error(TrainPipelineSparseDist(model, dense, Place.device), batches_of(PLAIN, counts[rank]))


@pytest.mark.parametrize(
    ("collections", "one_group"), [pytest.param(1, False, marks=FULL), pytest.param(2, False, marks=FULL), (2, True)]
)
@pytest.mark.parametrize("counts", [(6, 4), pytest.param((4, 6), marks=FULL)])
def test_data_that_ends_early_in_torchrecs_pipeline(
    killable_ranks: Ranks, counts: tuple[int, int], collections: int, one_group: bool
) -> None:
    """The pipeline exchanges ids one step ahead, so even the last batch that every rank has is not trained."""
    for steps, message in killable_ranks.run(uneven_in_torchrecs_pipeline, collections, one_group, counts):
        assert steps == min(counts) - 1
        assert "of 2 could not exchange" in message
        assert "has not taken part within the process group's timeout" in message


# ---- saves and state dicts in which one rank takes no part


def leave_others(rank: int, world_size: int, path: str) -> list[str]:
    """Returns the errors of saves and gathered state dicts on rank 0, after rank 1 has taken part in each only once."""
    model = train(sharded(PLAIN), PLAIN, range(1))
    saver, whole = rst.Saver(), {"sparse.embedding_bags.t1.weight": torch.empty(31, 4)}
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    gather: Any = functools.partial(rst.state_dict_gather, model.state_dict(), whole)
    get: Any = functools.partial(get_model_state_dict, model.module, options=full)
    for call in (gather, get, functools.partial(saver.save, model, path)):
        call()
    done = Path(path, "done")
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(job, "write_snapshot", lambda snapshot: wait_for(done))
        future = saver.save(model, path, background=True)
        calls = [gather, get, future.result, functools.partial(saver.load, model, path)] if rank == 0 else []
        with ThreadPoolExecutor(4) as together:  # all four calls wait for the timeout concurrently
            messages = list(together.map(error_of, calls))
        if rank == 0:
            done.touch()
        error_of(future.result)
    return [*messages, *sorted(os.listdir(path))]


def wait_for(file: Path) -> None:
    for _ in range(100 * TIMEOUT):  # the file normally appears within 20 s
        if file.exists():
            return
        time.sleep(0.1)


def test_a_save_without_one_rank_times_out(killable_ranks: Ranks, tmp_path: Path) -> None:
    """Rank 0 waits until the process group's timeout; its errors name the exchange that rank 1 missed."""
    found = killable_ranks.run(leave_others, str(tmp_path))[0]
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


WIDE = {key: [list(range(0, 200, 2))] for key in KEYS}
"""Ids that do not fit in the cache of rank 0."""


def fail_in_the_middle(rank: int, world_size: int, depth: int, kind: str, local_size: int | None) -> Any:
    scenario = Scenario(optimizer=torch.optim.Adagrad, cache=20 * world_size, seed=31, local_size=local_size)
    model = sharded(scenario)
    pipeline = pipeline_of(model, depth)

    def batches() -> Any:
        for step in range(5):
            yield batch_of(scenario, step)
            if step == 1 and kind != "none":
                yield jagged({"lacking": {"f0": [[1]]}, "wide": WIDE}[kind]) if rank == 1 else batch_of(scenario, 7)

    source, seen, steps = batches(), [], 0
    while True:
        try:
            pipeline.progress(source)
            steps += 1
        except StopIteration:
            return seen, steps, rows(model.module.sparse)
        except Exception as error:
            seen.append((steps, f"{type(error).__name__}: {error}"))


@pytest.mark.parametrize(
    ("kind", "error", "world_size", "local_size"),
    [
        ("lacking", "lacks features", 2, None),
        ("wide", "CacheTooSmallError", 2, None),
        ("lacking", "lacks features", 4, 2),
    ],
)
def test_a_batch_that_fails_in_a_pipeline(
    ranks_of: Start, kind: str, error: str, world_size: int, local_size: int | None
) -> None:
    ranks = ranks_of(world_size)
    without = ranks.run(fail_in_the_middle, 0, "none", local_size)
    for depth in (0, 1, 3) if local_size is None else (2,):
        first, *others = found = ranks.run(fail_in_the_middle, depth, kind, local_size)
        assert all(other[:2] == first[:2] for other in others)
        (((step, message),), steps, _) = first
        assert (step, steps) == (2, 5)
        assert error in message
        for actual, expected in zip(found, without, strict=True):
            assert_rows(actual[2], expected[2])


class TwoArgumentsError(Exception):
    """An exception that cannot be unpickled: its constructor does not take `args`."""

    def __init__(self, table: str, rows: int) -> None:
        super().__init__(f"table {table} has {rows} rows")


@on_ranks(2)
def test_an_error_that_cannot_be_unpickled(rank: int) -> None:
    exchange = sharded(PLAIN).module.sparse.exchange
    message = error_of(lambda: exchange.raise_on_all_ranks(TwoArgumentsError("t", 3) if rank == 1 else None))
    assert message == "RuntimeError: TwoArgumentsError: table t has 3 rows"


# ---- gradients


@on_ranks(2)
@pytest.mark.parametrize("guard", ["raise", "scaler"])
def test_a_nan_of_one_rank(rank: int, guard: str) -> str:
    scenario = Scenario(optimizer=torch.optim.Adagrad, cache=1.0)
    origin, scaler = Model(scenario, 3), torch.amp.GradScaler("cpu", init_scale=4.0)
    if guard == "scaler":
        origin.sparse.set_grad_scaler(scaler)
    else:
        origin.sparse.embedding._set_options(check_finite=guard)
    model = shard(origin, scenario).module
    # Rank 1 looks up odd ids, which it owns itself; only its gradients are NaN.
    batch = jagged({key: [[2 * i + rank] for i in range(3)] for key in KEYS})

    def step(bad: bool) -> str:
        loss, _ = model(batch)  # no DistributedDataParallel: it cannot continue after an error in a backward pass
        factor = float("nan") if bad else scaler.get_scale() if guard == "scaler" else 1.0
        return error_of((loss * factor).backward)

    step(False)
    before = rows(model.sparse)
    raised = step(rank == 1)
    assert raised.startswith("FloatingPointError") == ("NaN or infinite" in raised) == (guard == "raise")
    assert not list(differing_tensors(rows(model.sparse), before)), "no rank changes rows"
    assert step(False) == ""
    assert list(differing_tensors(rows(model.sparse), before)), "and all can go on"
    assert model.sparse.local_shard.skipped_updates == (guard == "scaler")
    return raised


@on_ranks(2)
def test_a_batch_that_fails_fails_on_all_ranks(rank: int) -> list[str]:
    model = shard(Model(Scenario(cache=8), 0), PLAIN)
    good, seen = jagged({key: [[1], [2]] for key in KEYS}), []
    # batches of rank 1: the first lacks features, the second exceeds rank 0's cache
    for bad in (jagged({"f0": [[1]]}), jagged(WIDE)):
        seen.append(error_of(lambda bad=bad: model(good if rank == 0 else bad)[0].backward()))
        model(good)[0].backward()
    outputs = model.module.sparse(jagged(WIDE))
    assert error_of(outputs.wait) == error_of(outputs.wait), "an output of a batch that failed is never read"
    assert "lacks features" in seen[0]
    assert seen[1].startswith("CacheTooSmallError")
    assert error_of(outputs.wait).startswith("CacheTooSmallError")
    return seen
