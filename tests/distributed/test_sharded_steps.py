"""update="step" on several ranks: gradients of all ranks' rows and of dense parameters are clipped by one norm."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from batches import jagged
from ranks import Place, Start, error_of, on_ranks
from sharded_model import (
    Model,
    Scenario,
    assert_rows,
    assert_same,
    bags_of,
    batch_of,
    concatenated,
    optimizer_of,
    rows,
    sharded,
    train_sharded,
    united,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad, clip_grad_norm_, clip_grad_value_
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer

import rec_sdk_torch as rst

MIXED = Scenario(
    update="step",
    optimizer=torch.optim.Adagrad,
    options={"eps": 1e-3},
    sharding=("row_wise", "data_parallel", "table_wise"),
    sizes=((3, 1), (0, 2)),  # rank 0 has no samples in every second step
    steps=5,
    seed=71,
)
KINDS = ("2", "inf", "1", "value", "patched", "torchrec", "torchrec inf", "torchrec global", "torchrec groups")


def clipped(kind: str, model: Any, optimizer: Any) -> Any:
    """Clips gradients and runs `step()`; returns the gradient norm, or None if the kind of clipping computes none."""
    if kind == "value":
        clip_grad_value_(model.parameters(), 0.01)
        return optimizer.step()
    if not kind.startswith("torchrec"):
        clip, norm_type = (torch.nn.utils.clip_grad_norm_, 2.0) if kind == "patched" else (clip_grad_norm_, float(kind))
        norm = clip(model.parameters(), 0.05, norm_type)
        optimizer.step()
        return norm
    options: dict[str, Any] = {"norm_type": "inf" if kind.endswith("inf") else 2.0}
    if not kind.endswith("inf"):
        options["enable_global_grad_clip"] = kind != "torchrec"
    if kind.endswith("groups") and dist.is_initialized():  # process groups are given for only one of the sharded tables
        named = dict(model.named_parameters())
        (handle,) = [each for name, each in named.items() if ".t0." in name]
        options["param_to_pgs"] = {handle: [dist.group.WORLD]}
    clipping = GradientClippingOptimizer(optimizer, GradientClipping.NORM, 0.05, **options)
    clipping.step()
    return clipping.last_total_grad_norm


def train_clipped(rank: int, world_size: int, scenario: Scenario, kind: str, passes: int = 1) -> Any:
    """Trains one rank, or with rank -1 one process on all ranks' batches; returns (norms, rows, dense parameter)."""
    alone = rank < 0
    model: Any = Model(scenario, seed=3, cache=1000) if alone else sharded(scenario, cache=1000)
    inner = model if alone else model.module
    optimizer, norms = optimizer_of(inner, lr=0.05), []
    for step in range(scenario.steps):
        batches = bags_of(scenario, step, world_size)
        loss, _ = model(concatenated(batches) if alone else jagged(*batches[rank]))
        if step % passes == 0:
            optimizer.zero_grad()
        (loss / world_size if alone else loss).backward()
        if step % passes == passes - 1:
            norms.append(clipped(kind, model, optimizer))
    return [n if n is None else n.cpu() for n in norms], rows(inner.sparse), inner.scale.detach().cpu().clone()


def train_patched(rank: int, world_size: int, scenario: Scenario, kind: str, passes: int) -> Any:
    """Runs `train_clipped` after replacing torch's clipping function, as another library may do."""
    known = clip_grad.clip_grad_norm_
    unchanged = functools.partial(clip_grad._no_grad(inspect.unwrap(known)))
    torch.nn.utils.clip_grad_norm_ = clip_grad.clip_grad_norm_ = unchanged
    try:
        return train_clipped(rank, world_size, scenario, kind, passes)
    finally:
        torch.nn.utils.clip_grad_norm_ = clip_grad.clip_grad_norm_ = known


@pytest.mark.parametrize(("kind", "passes"), [*((kind, 1) for kind in KINDS), ("2", 2), ("torchrec groups", 2)])
def test_ranks_clip_as_one_process(ranks_of: Start, kind: str, passes: int) -> None:
    results = ranks_of(2).run(train_patched if kind == "patched" else train_clipped, MIXED, kind, passes)
    norms, rows_alone, scale = train_clipped(-1, 2, MIXED, kind, passes)
    near = {"rtol": 1e-4, "atol": 1e-6}
    for of_rank in results:
        torch.testing.assert_close(of_rank[0], norms, **near)
        torch.testing.assert_close(of_rank[2], scale, **near)
    assert torch.equal(results[0][2], results[1][2]), "the dense parameter has the bits of all ranks"
    assert kind == "value" or any(float(norm) > 0.05 for norm in norms), "some gradients are clipped"
    assert_rows(united([result[1] for result in results], MIXED.sharding), rows_alone, **near)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["bags", "sequences", "hash"])
def test_step_updates_have_the_bits_of_backward_updates(rank: int, world_size: int, kind: str) -> None:
    scenario = replace(MIXED, kind=kind, optimizer=torch.optim.Adam, options={"betas": (0.8, 0.9)}, steps=6)
    in_backward = train_sharded(rank, world_size, replace(scenario, update="backward"))[1]
    for depth in (0, 2):
        assert_same(train_sharded(rank, world_size, scenario, depth)[1], in_backward)


@on_ranks(2)
def test_several_backward_passes_through_one_forward() -> None:
    made = []
    for passes in (1, 2):
        model = sharded(replace(MIXED, optimizer=torch.optim.SGD, options={}))
        loss, _ = model(batch_of(MIXED, 0))
        if passes == 1:
            (2 * loss).backward()
        else:
            loss.backward(retain_graph=True)
            loss.backward()
        optimizer_of(model.module, lr=0.05).step()
        made.append(rows(model.module.sparse))
    assert_rows(*made, rtol=1.3e-6, atol=1e-5)


def norms(rank: int, world_size: int, norm_type: float, update: str) -> Any:
    """Returns the gradient norms over all ranks, and over this rank's rows only.

    Rank -1 is one process with the batches of all ranks.
    """
    alone, scenario = rank < 0, replace(MIXED, update=update)
    model: Any = Model(scenario, seed=3, cache=1000) if alone else sharded(scenario, cache=1000)
    sparse, batches = (model if alone else model.module).sparse, bags_of(scenario, 0, world_size)
    if update == "backward":
        sparse.count_grad_norms()
    loss, _ = model(concatenated(batches) if alone else jagged(*batches[rank]))
    (loss / world_size if alone else loss).backward()
    return sparse.grad_norm(norm_type), sparse.grad_norm(norm_type, local=True)


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_norms_cover_the_rows_of_all_ranks(ranks_of: Start, norm_type: float, update: str) -> None:
    """A rank can also compute the norms of its own rows only. Table t1 is replicated on all ranks."""
    (first, one), (second, other) = ranks_of(2).run(norms, norm_type, update)
    assert first == second
    expected, _ = norms(-1, 2, norm_type, update)
    torch.testing.assert_close(first.total, expected.total)
    torch.testing.assert_close(first.tables, expected.tables)
    assert one.tables["t1"] == other.tables["t1"] == first.tables["t1"]
    for table in ("t0", "t2"):
        parts = torch.tensor([each.tables[table] for each in (one, other)], dtype=torch.float64)
        assert float(torch.linalg.vector_norm(parts, norm_type)) == pytest.approx(first.tables[table])


# ---- overflows and steps of one rank only


@on_ranks(2)
def test_an_overflow_on_one_rank_skips_the_step_of_all(rank: int) -> None:
    """Only rank 1's loss overflows; every rank skips the step and halves the scale."""
    tables = sharded(replace(MIXED, sharding=("row_wise",) * 3, optimizer=torch.optim.SGD, options={})).module.sparse
    scaler = ShardedGradScaler(Place.device.type, init_scale=4.0, growth_interval=100)
    batch = jagged({"f0": [[1]], "f1": [[3]], "f2": [[5]], "f3": [[7]]})  # rank 1 owns all of these ids
    steps = []
    for factor in (1.0, 1e38, 1.0):
        tables.fused_optimizer.zero_grad()
        output = tables(batch).values().sum()
        scaler.scale(output * (factor if rank == 1 else 1.0)).backward()
        scaler.step(tables.fused_optimizer)
        scaler.update()
        state = tables.fused_optimizer.state_dict()["state"]["embedding_bags.t0.weight"]
        steps.append((int(state["t0.step"]), scaler.get_scale()))
    assert steps == [(1, 4.0), (1, 2.0), (2, 2.0)]


@on_ranks(2)
@pytest.mark.parametrize("kind", ["all", "step", "zero_grad"])
def test_a_step_of_one_rank_is_refused(rank: int, kind: str) -> str:
    tables, batch = sharded(MIXED).module.sparse, jagged(*bags_of(MIXED, 0, 2)[0])
    tables(batch).values().sum().backward()
    if kind == "all":
        tables.fused_optimizer.step()
    elif rank == 1:
        getattr(tables.fused_optimizer, kind)()
    message = error_of(lambda: tables(batch).values().sum().backward())
    wrong = "ValueError" in message and "backward passes pending for step() is 1 on rank 0, None on rank 1" in message
    assert wrong if kind != "all" else not message
    return message


@on_ranks(2)
def test_unsharded_tables_have_no_common_norm() -> None:
    """Clipping by value still works."""
    model = DistributedDataParallel(Model(replace(MIXED, sharding=("row_wise",) * 3), 3))
    model(batch_of(MIXED, 0))[0].backward()
    with pytest.raises(ValueError, match=r"clip_grad_norm_ cannot clip tables \['t0', 't1', 't2'\]"):
        clip_grad_norm_(model.parameters(), 1.0)
    clip_grad_value_(model.parameters(), 1.0)


# ---- replicated tables whose gradients one rank changes


def clip_alone(handle: Any) -> None:
    torch.nn.utils.clip_grads_with_norm_([handle], 1e-3, torch.linalg.vector_norm(handle.grad))


def clip_without_effect(handle: Any) -> None:
    """Clips to a norm far above the gradient's, so that no value changes."""
    clip_grad_norm_([handle], 1e9)


CHANGES: dict[str, Callable[[Any], object]] = {
    "halved": lambda handle: handle.grad.mul_(0.5),
    "clipped": clip_alone,
    "left out": lambda handle: setattr(handle, "grad", None),
    "only looked at": clip_without_effect,
    "dropped": clip_without_effect,
}


def changed_alone(kind: str, ranks: tuple[int, ...], then: str, folder: Path, behind: int = 0) -> str:
    """Returns the error message after only some ranks have changed the gradient of the replicated table t1.

    Args:
        kind: the change, a key of `CHANGES`.
        ranks: the ranks that change the gradient.
        then: the call that follows.
        folder: folder for the save, if `then` is "save".
        behind: number (0 or 1) of the backward pass after which the gradient is changed.
    """
    model = sharded(MIXED)
    tables, batch = model.module.sparse, jagged(*bags_of(MIXED, 0, 2)[0])
    (handle,) = [each for name, each in tables.named_parameters() if ".t1." in name]
    for number in range(2):
        tables(batch).values().pow(2).sum().backward()
        if number == behind and Place.rank in ranks:
            CHANGES[kind](handle)
    if then == "drop" or (kind == "dropped" and Place.rank in ranks):
        tables.fused_optimizer.zero_grad()
    tables.fused_optimizer.step()
    try:
        if then == "save":
            rst.Saver().save(model.module, folder)
        if then == "read":
            with torch.no_grad():
                tables(batch).values()
        tables(batch).values().sum().backward()
    except ValueError as error:
        return str(error)
    return ""


@on_ranks(2)
@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize(
    ("kind", "then", "doing"),
    [("halved", "read", "evaluates"), ("clipped", "train", "trains"), ("left out", "save", "saves")],
)
def test_a_gradient_that_one_rank_changes_is_refused(
    tmp_path: Path, kind: str, then: str, doing: str, behind: int
) -> None:
    found = changed_alone(kind, (1,), then, tmp_path, behind)
    assert f"each rank {doing}" in found
    assert "table 't1': changes of its grad is None on rank 0, checksum" in found
    assert "not the same on all ranks" in found


@on_ranks(2)
def test_a_save_after_a_step_that_one_rank_skipped_is_refused(tmp_path: Path) -> None:
    found = changed_alone("dropped", (1,), "save", tmp_path)
    assert "each rank saves" in found
    assert "table 't1': step is 1 on rank 0, 0 on rank 1" in found
    assert not list(tmp_path.iterdir())


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "ranks", "then"),
    [
        ("halved", (0, 1), "train"),
        ("clipped", (0, 1), "save"),
        ("left out", (0, 1), "train"),
        ("only looked at", (1,), "train"),
        ("halved", (1,), "drop"),
    ],
)
def test_changes_that_keep_replicas_equal_are_accepted(
    tmp_path: Path, kind: str, ranks: tuple[int, ...], then: str
) -> None:
    assert changed_alone(kind, ranks, then, tmp_path) == ""
