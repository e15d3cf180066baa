"""The hierarchical (two-level) all-to-all: bit-identical to a one-level all-to-all, with fewer messages.

The last tests count the calls of one training batch through a sharded collection.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from batches import jagged
from call_counts import CallCounter, call_counter
from collection_factory import apply, bag_config, bags_collection, sequence_config, sequences_collection
from ranks import Place as Device
from ranks import Start, error_of, on_ranks
from sharded_model import (
    Scenario,
    assert_same,
    batch_of,
    shard_tables,
    sharded,
    train,
    train_sharded,
)

import rec_sdk_torch as rst
from rec_sdk_torch.distributed import all_to_all
from rec_sdk_torch.distributed.topology import RankLocation, machine_size

MIXED = ("row_wise", "data_parallel", "table_wise")
SHOW_CLICK = {
    "policy_type": rst.AdmitAndEvictPolicyType.POLICY_SHOWCLICK,
    "showclick_params": rst.ShowClickParams(alpha=0.5, beta=1, admit_threshold=3),
}
UNEVEN = ((5, 2, 0, 3), (0, 3, 1, 0), (1, 0, 0, 4), (0, 0, 0, 0))
CASES = {
    "bags": Scenario(optimizer=torch.optim.Adam, dims=(4, 8, 3), sizes=UNEVEN, steps=5, seed=81),
    "sequences": Scenario(kind="sequences", optimizer=torch.optim.Adagrad, sharding=MIXED, sizes=UNEVEN, seed=82),
    "hash": Scenario(kind="hash", weighted=True, optimizer=torch.optim.Adam, dims=(4, 8, 4), sizes=UNEVEN, seed=83),
    "replicas": Scenario(sharding=("data_parallel",) * 3, optimizer=torch.optim.Adagrad, sizes=UNEVEN, seed=84),
    "numbers": Scenario(rules=SHOW_CLICK, sharding=MIXED, optimizer=torch.optim.Adam, sizes=UNEVEN, steps=6, seed=85),
    "swaps": Scenario(cache=80, ids=300, sizes=((2, 1, 0, 3),), optimizer=torch.optim.Adam, steps=8, seed=86),
    "step": Scenario(update="step", optimizer=torch.optim.Adagrad, sharding=MIXED, sizes=UNEVEN, seed=87),
}


DEPTHS = {"bags": (1, 3), "sequences": (0, 2), "hash": (2,), "replicas": (1,), "numbers": (0, 3), "swaps": (1,)}


@on_ranks()
@pytest.mark.parametrize(
    ("name", "world_size", "local_size", "depths"),
    [*((name, 4, 2, DEPTHS.get(name, (0,))) for name in CASES), ("bags", 6, 3, (1,)), ("numbers", 6, 2, (2,))],
)
def test_two_levels_have_the_bits_of_one(
    rank: int, world_size: int, name: str, local_size: int, depths: tuple[int, ...]
) -> None:
    """The world size is not a square, since equal numbers of machines and local ranks would hide a transposition."""
    scenario = CASES[name]
    one = train_sharded(rank, world_size, scenario)  # with the same bits at every depth
    for depth in depths:
        two = train_sharded(rank, world_size, replace(scenario, local_size=local_size), depth)
        assert_same(two[:3], one[:3])
        for table, expected in one[1].items():
            assert list(two[1][table]) == list(expected), "the rows of the rank have their order"
        exchange_counters = {
            name: two[3][name] for name in one[3] if name not in ("messages", "bytes_within", "bytes_between")
        }
        assert exchange_counters.items() <= one[3].items()
        assert 0 < two[3]["messages"] < one[3]["messages"]


# ---- messages and bytes


def exchange_counters(
    rank: int, world_size: int, scenario: Scenario, one_group: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the exchange counters of an evaluation batch, and of the training batch that follows."""
    one_group &= Device.device.type == "cpu"  # only on the host can the process group of rows exchange ids too
    model, batch = sharded(scenario, one_group=one_group), batch_of(scenario, 0)
    with torch.no_grad():
        model.eval()(batch)
    read = model.module.sparse.exchange_stats()
    model.train()(batch)[0].backward()
    after = model.module.sparse.exchange_stats()
    return read, {name: after[name] - read[name] for name in after}


@pytest.mark.parametrize("one_group", [False, True])
@pytest.mark.parametrize(("world_size", "local_size"), [(4, None), (4, 1), (4, 2), (4, 4), (6, 3), (6, 2)])
def test_messages_and_bytes(ranks_of: Start, world_size: int, local_size: int | None, one_group: bool) -> None:
    scenario = Scenario(dims=(4, 8, 4), sizes=((5, 2, 0, 3),), local_size=local_size, seed=88)
    size = local_size or 1
    peers = size - 1 + world_size // size - 1
    if size == world_size:
        peers = world_size - 1
    found = ranks_of(world_size).run(exchange_counters, scenario, one_group)
    for read, trained in found:
        apart = size not in (1, world_size)  # in shared memory, ids are sent with their numbers
        assert read["messages"] == (3 + apart) * peers, "numbers of ids, ids, rows of two dims"
        assert trained["messages"] == (5 + apart) * peers, "and gradients of two dims"
        if size == 1:
            assert read["bytes_within"] == trained["bytes_within"] == 0
        if size == world_size:
            assert read["bytes_between"] == trained["bytes_between"] == 0
    if size not in (1, world_size):
        return
    # The id counts for each rank are one message of fixed width: four 8-byte numbers, then one per table.
    own = sum(trained[name] for _, trained in found for name in ("id_bytes", "row_bytes", "grad_bytes"))
    sent = sum(trained[name] for _, trained in found for name in ("bytes_within", "bytes_between"))
    numbers = sent - own
    assert numbers % (8 * world_size * (world_size - 1)) == 0
    assert numbers // (8 * world_size * (world_size - 1)) >= 4 + 3


def test_bytes_of_each_level(ranks_of: Start) -> None:
    """Each rank looks up one id that rank 3 (local rank 1 of machine 1) owns. Rank 1 forwards the ids of machine 0."""
    to_place = {0: 1, 2: 1}  # ids and gradients sent to the rank with local rank 1
    for rank, stats in enumerate(ranks_of(4).run(count_one)):
        row, width = 4 * 4, stats["width"]
        questions_between = 2 * (rank == 1)
        answers_between, answers_within = 2 * (rank == 3), 1 * (rank in (1, 3))
        assert stats["bytes_within"] == to_place.get(rank, 0) * (8 + row) + answers_within * row + 2 * width
        assert stats["bytes_between"] == questions_between * (8 + row) + answers_between * row + 2 * width


def count_one(rank: int, world_size: int) -> dict[str, int]:
    collection = sequences_collection(Device.device, sequence_config("t", ["f"]), cache=1.0)
    rst.apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.1})
    tables = shard_tables(collection, "table_wise", [world_size - 1], local_size=2)
    tables(jagged({"f": [[rank]]}))["f"].values().sum().backward()
    stats: dict[str, int] = tables.exchange_stats() | {"width": 8 * tables.exchange.group_state.width}
    return stats


# ---- invalid numbers of ranks per machine


ON_TWO = {"LOCAL_WORLD_SIZE": ["2"] * 4, "LOCAL_RANK": ["0", "1", "0", "1"]}
ON_ONE = {"LOCAL_WORLD_SIZE": ["4"] * 4, "LOCAL_RANK": ["0", "1", "2", "3"]}


@pytest.mark.parametrize(
    ("options", "places", "message"),
    [
        ([3] * 4, {}, "ValueError: local_size=3: 4 ranks are not machines of 3 each"),
        ([8] * 4, {}, "ValueError: local_size=8: 4 ranks are not machines of 8 each"),
        ([2, 2, None, 2], {}, "local_size is 2 on ranks 0, 1 and 3, None on rank 2"),
        ([2, "auto", 2, 2], ON_TWO, "local_size is 2 on ranks 0, 2 and 3, 'auto' on rank 1"),
        (["auto"] * 4, {}, "ValueError: local_size='auto' reads LOCAL_WORLD_SIZE and LOCAL_RANK"),
        ([0] * 4, {}, "ValueError: local_size is 0, expected at least 1"),
        (["all"] * 4, {}, "ValueError: local_size is 'all', allowed are"),
        ([2.0] * 4, {}, "TypeError: local_size is 2.0, expected the number of ranks"),
        ([True] * 4, {}, "TypeError: local_size is True, expected the number of ranks"),
        (["auto"] * 4, ON_TWO, f"messages {4 * 2}"),
        (["auto"] * 4, ON_ONE, f"messages {3 * 3}"),
        ([2] * 4, ON_ONE, f"messages {4 * 2}"),
        ([None] * 4, ON_TWO, f"messages {3 * 3}"),
    ],
)
@on_ranks(4)
def test_every_rank_has_the_same_error(rank: int, options: list[Any], places: Any, message: str) -> str:
    """Sets each rank's LOCAL_WORLD_SIZE and LOCAL_RANK from `places`; all ranks raise the same error."""
    with pytest.MonkeyPatch.context() as patch:
        for name, values in places.items():
            patch.setenv(name, values[rank])
        made: list[Any] = []
        outcome = error_of(lambda: made.append(sharded(Scenario(local_size=options[rank]))))
        for model in made:
            train(model, Scenario(), range(1))
            outcome = f"messages {model.module.sparse.exchange_stats()['messages']}"
    assert message in outcome
    return outcome


def test_machines_of_the_environment() -> None:
    two = [RankLocation(2, 0), RankLocation(2, 0), RankLocation(2, 2), RankLocation(2, 2)]
    assert machine_size("auto", two) == 2
    assert machine_size(4, two) == 4, "machines may be taken together"
    assert machine_size(1, two) == 1
    assert (
        machine_size("auto", [RankLocation(4, 0), RankLocation(4, 0), RankLocation(4, 4), RankLocation(4, 4)]) == 2
    ), "of a smaller group"
    with pytest.raises(ValueError, match=r"machines have \[1, 3\] ranks of this process group"):
        machine_size("auto", [RankLocation(3, 0), RankLocation(3, 0), RankLocation(3, 0), RankLocation(1, 3)])
    mixed = [RankLocation(2, 0), RankLocation(2, 2), RankLocation(2, 0), RankLocation(2, 2)]
    for option in ("auto", 2):
        with pytest.raises(ValueError, match=r"not side by side in the process group: .* at ranks \[0, 2, 0, 2\]"):
            machine_size(option, mixed)
    with pytest.raises(ValueError, match=r"ranks \[1\] do not have them"):
        machine_size("auto", [RankLocation(2, 0), RankLocation(2, None)])


# ---- ranks that do not wait


@on_ranks(4)
def test_a_rank_that_ignores_its_output_blocks_none(rank: int) -> None:
    """Only rank 3 uses the output of its evaluation batch; then all ranks synchronize in a separate group."""
    scenario = Scenario(local_size=2)
    tables = sharded(scenario).module.sparse.eval()
    with torch.no_grad():
        output = tables(batch_of(scenario, 0))
        if rank == 3:
            output.values()
    torch.distributed.barrier()


# ---- calls of a batch


ROWS = 16
ALL_TO_ALL, TWO_LEVELS = "distributed/all_to_all.py", "distributed/hierarchical_all_to_all.py"


def count_calls_of_rank(rank: int, world_size: int, local_size: int | None, shared: bool) -> tuple[CallCounter, int]:
    """Counts the calls of one training batch of two tables in one group; also returns how many rows the cache
    spilled. If not `shared`, ranks exchange over the process group.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not shared:
            patch.setattr(all_to_all, "connect", lambda group: None)
        return count_calls(rank, world_size, local_size)


def count_calls(rank: int, world_size: int, local_size: int | None) -> tuple[CallCounter, int]:
    configs = (bag_config(f"t{table}", [f"f{table}"], num_embeddings=1000) for table in range(2))
    with call_counter() as calls:
        collection = bags_collection(
            Device.device, *configs, cache=ROWS * 5 // 2
        )  # the cache holds two and a half batches of each rank
        apply(collection, torch.optim.Adagrad, lr=0.1)
        tables = shard_tables(collection, local_size=local_size)

        def train(number: int) -> None:
            ids = [[ROWS * (world_size * number + rank) + row] for row in range(ROWS)]
            tables(jagged({"f0": ids, "f1": ids})).wait().values().sum().backward()

        for number in range(4):
            train(number)
        calls.count(lambda: train(4))
        return calls, tables.cache_stats()["rows_out"]


@pytest.fixture
def on_host(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("on a device autograd has a thread of its own, and batches wait for copies")


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize(("shared", "most", "classes", "entries"), [(True, 172, 29, 7), (False, 132, 25, 6)])
def test_calls_of_a_sharded_batch(ranks_of: Start, shared: bool, most: int, classes: int, entries: int) -> None:
    calls, rows_out = ranks_of(2).run(count_calls_of_rank, None, shared)[0]
    assert rows_out >= ROWS, "rows leave in every batch"
    calls.check(calls=most, classes=classes, cache=5, step=3)
    once = ("plan", "read_in", "apply_without_swap", "start_plans", "applied", "release", "complete_write_back")
    assert +calls.engine == Counter(once)
    assert calls.entries[ALL_TO_ALL] <= entries, "numbers of ids, ids, vote, rows, gradients"
    assert not calls.entries[TWO_LEVELS]


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize(("shared", "most"), [(True, 330), (False, 202)])
def test_calls_of_a_batch_with_two_levels(ranks_of: Start, shared: bool, most: int) -> None:
    calls, _ = ranks_of(4).run(count_calls_of_rank, 2, shared)[0]
    assert calls.entries[TWO_LEVELS] > 0
    assert calls.calls <= most
