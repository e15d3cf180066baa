"""Simulates each table at several cache sizes under several policies, and recommends a cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .costs import Bandwidth
from .simulation import Counts, Simulation
from .traces import TableTrace

STEPS = 12
"""Number of cache sizes that are simulated by default."""

Progress: TypeAlias = Callable[[Sequence[tuple[str, int]]], Iterable[tuple[str, int]]]
"""Function that iterates over a sequence and may show the progress."""


@dataclass(frozen=True)
class Table:
    """The simulated caches of one table.

    Attributes:
        name: name of the table.
        lookups: number of ids in the trace, with repetitions.
        distinct: number of distinct ids.
        largest: largest number of distinct ids in one batch.
        record_bytes: bytes of a row in the cache.
        sizes: simulated cache sizes in rows, ascending.
        counts: by policy, the counts of the simulated runs, one for each of `sizes`.
    """

    name: str
    lookups: int
    distinct: int
    largest: int
    record_bytes: int
    sizes: list[int]
    counts: dict[str, list[Counts]]


@dataclass(frozen=True)
class Advice:
    """The recommended cache.

    Attributes:
        policy: name of the policy.
        size_indices: by table, the index of the chosen size in `Table.sizes`.
        seconds: modelled time of copying the missing rows and victims of one batch, summed over all tables.
    """

    policy: str
    size_indices: dict[str, int]
    seconds: float


def cache_sizes(requested: Sequence[float], distinct: int, largest: int) -> list[int]:
    """Returns the cache sizes to simulate, in rows, ascending.

    Args:
        requested: numbers up to 1 are fractions of the distinct ids; larger numbers are rows. If empty, `STEPS` sizes
            in a geometric series are returned, from twice `largest` to `distinct`.
        distinct: number of distinct ids.
        largest: largest number of distinct ids in one batch; the cache cannot be smaller.
    """
    if requested:
        rows = [math.ceil(each * distinct) if each <= 1 else round(each) for each in requested]
    else:
        low = min(distinct, 2 * largest)
        rows = [round(low * (distinct / low) ** (step / (STEPS - 1))) for step in range(STEPS)]
    return sorted({min(max(each, largest), distinct) for each in rows})


def simulate_table(
    name: str,
    trace: TableTrace,
    samples: int,
    requested: Sequence[float],
    policies: Sequence[str],
    ahead: int,
    record_bytes: int,
    progress: Progress,
) -> Table:
    """Simulates one table under all policies and sizes.

    Args:
        name: name of the table.
        trace: the lookups of the table.
        samples: number of samples per batch.
        requested: cache sizes, see `cache_sizes`; may be empty.
        policies: names of the policies.
        ahead: number of future batches that look-ahead policies see.
        record_bytes: bytes of a row in the cache.
        progress: wraps the iterable of simulations to show progress, as tqdm does.
    """
    simulation = Simulation(trace.ids, trace.starts(samples))
    sizes = cache_sizes(requested, simulation.distinct, simulation.largest)
    counts: dict[str, list[Counts]] = {policy: [] for policy in policies}
    for policy, slots in progress([(policy, slots) for policy in policies for slots in sizes]):
        counts[policy].append(simulation.run(slots, policy, ahead))
    return Table(name, len(trace.ids), simulation.distinct, simulation.largest, record_bytes, sizes, counts)


def _swap_seconds(table: Table, policy: str, size_index: int, bandwidth: Bandwidth) -> float:
    return bandwidth.seconds(table.counts[policy][size_index], table.record_bytes)


def _sizes_by_misses(tables: Sequence[Table], policy: str, misses: float) -> dict[str, int]:
    """Chooses each table's smallest size with a miss rate of at most `misses`; if there is none, its largest size."""
    chosen = {}
    for table in tables:
        rates = [counts.miss_rate for counts in table.counts[policy]]
        chosen[table.name] = next((i for i, rate in enumerate(rates) if rate <= misses), len(rates) - 1)
    return chosen


def _sizes_by_memory(tables: Sequence[Table], policy: str, memory: int, bandwidth: Bandwidth) -> dict[str, int]:
    """Chooses sizes that fit into `memory` bytes, greedily.

    Starts with the smallest sizes, and repeatedly takes the step to a larger size that saves most time per byte.
    """
    chosen = {table.name: 0 for table in tables}
    free = memory - sum(table.sizes[0] * table.record_bytes for table in tables)
    while True:
        steps = []
        for table in tables:
            now = chosen[table.name]
            for size_index in range(now + 1, len(table.sizes)):
                cost = (table.sizes[size_index] - table.sizes[now]) * table.record_bytes
                saved = _swap_seconds(table, policy, now, bandwidth) - _swap_seconds(
                    table, policy, size_index, bandwidth
                )
                if cost <= free and saved > 0:
                    steps.append((saved / cost, table.name, size_index, cost))
        if not steps:
            return chosen
        _, name, size_index, cost = max(steps)
        chosen[name], free = size_index, free - cost


def choose_cache(tables: Sequence[Table], bandwidth: Bandwidth, misses: float, memory: int | None) -> Advice:
    """Chooses the policy, and the size of each table's cache.

    Without `memory`, chooses the policy that needs the least memory to reach the miss rate `misses`. With `memory`,
    chooses the policy with the least modelled time.

    Args:
        tables: simulated tables, all with the same policies.
        bandwidth: bandwidth of copies between the host and the device.
        misses: largest allowed miss rate; only used without `memory`. See `Counts.miss_rate`.
        memory: bytes of device memory for all tables; None for no limit.

    Raises:
        ValueError: even the smallest caches need more than `memory`; the message has the number of bytes.
    """
    if memory is not None:
        least = sum(table.sizes[0] * table.record_bytes for table in tables)
        if least > memory:
            raise ValueError(
                f"--memory is {memory} bytes, the smallest caches of the {len(tables)} tables need {least} bytes: "
                "--sizes tries smaller ones"
            )
    candidates = []
    for policy in tables[0].counts:
        size_indices = (
            _sizes_by_misses(tables, policy, misses)
            if memory is None
            else _sizes_by_memory(tables, policy, memory, bandwidth)
        )
        seconds = sum(_swap_seconds(table, policy, size_indices[table.name], bandwidth) for table in tables)
        candidates.append(Advice(policy, size_indices, seconds))
    if memory is None:
        return min(candidates, key=lambda advice: (_total_bytes(tables, advice.size_indices), advice.seconds))
    return min(candidates, key=lambda advice: (advice.seconds, _total_bytes(tables, advice.size_indices)))


def _total_bytes(tables: Sequence[Table], size_indices: Mapping[str, int]) -> int:
    return sum(table.sizes[size_indices[table.name]] * table.record_bytes for table in tables)
