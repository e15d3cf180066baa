"""Cache sizing: computes the number of cache slots of each table from `cache=`, the batches and device memory."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..._engine import available_memory
from ...runtime.numbers import as_int
from ...runtime.settings import parse_bytes, read_settings
from ...runtime.warn import ConfigurationWarning, warn
from .table import TableConfig

CacheSize = int | float | str
CacheOption = CacheSize | Mapping[str, CacheSize] | None


@dataclass(frozen=True)
class BatchHint:
    """The largest expected batch, from which cache sizes are derived.

    Attributes:
        batch_size: number of samples in a batch of one rank; None if it is not known.
        multi_hot_sizes: ids per sample, for each table; None: one id per feature.
        world_size: number of ranks whose ids are looked up in one cache.
    """

    batch_size: int | None = None
    multi_hot_sizes: Sequence[int] | None = None
    world_size: int = 1

    def rows(self, tables: Sequence[TableConfig], batches: int) -> list[int]:
        """Returns the largest number of rows of each table that `batches` batches can need; 1 without a batch size.

        Raises:
            TypeError, ValueError: a field is not a positive int, or `multi_hot_sizes` has another length than `tables`.
        """
        sizes = self.multi_hot_sizes
        if sizes is None:
            sizes = [table.num_features for table in tables]
        if not isinstance(sizes, Iterable):
            raise TypeError(f"multi_hot_sizes is {sizes!r}, expected a list with an int for each table")
        sizes = list(sizes)
        if len(sizes) != len(tables):
            raise ValueError(f"multi_hot_sizes has {len(sizes)} entries for {len(tables)} tables")
        batch_size = None if self.batch_size is None else _positive_int("batch_size", self.batch_size)
        world_size = _positive_int("world_size", self.world_size)
        checked = [_positive_int("an entry of multi_hot_sizes", size) for size in sizes]
        if batch_size is None:
            return [1] * len(tables)
        return [
            min(table.num_embeddings, batches * batch_size * size * world_size)
            for table, size in zip(tables, checked, strict=True)
        ]


def _positive_int(name: str, value: object) -> int:
    number = as_int(value)
    if number is None:
        raise TypeError(f"{name} is {value!r}, expected an int")
    if number < 1:
        raise ValueError(f"{name} is {number}, must be at least 1")
    return number


def _check_size(where: str, size: CacheSize) -> None:
    if isinstance(size, bool) or not isinstance(size, (numbers.Real, str)):
        raise TypeError(f"{where}: {size!r} is neither rows (int), a fraction (float) nor bytes (str)")
    if isinstance(size, str):
        parse_bytes(size, where)
    elif not isinstance(size, numbers.Integral):
        if not 0.0 < size <= 1.0:
            raise ValueError(f"{where}: the fraction {size} is not in (0, 1]")
    elif size < 1:
        raise ValueError(f"{where}: {size} rows, must be at least 1")


def warn_of_one_row(tables: Sequence[TableConfig], cache: CacheOption) -> None:
    """Warns of `cache=1`, since the int 1 means one row and the float 1.0 means the whole table."""
    for table in tables:
        size = cache.get(table.name) if isinstance(cache, Mapping) else cache
        if isinstance(size, numbers.Integral) and size == 1 < table.num_embeddings:
            warn(
                f"cache of table {table.name!r}: the int 1 is one of its {table.num_embeddings} rows; 1.0 is all rows",
                ConfigurationWarning,
            )


def check_cache_option(tables: Sequence[TableConfig], cache: CacheOption) -> None:
    """Checks the option `cache`, except for what depends on the device.

    Raises:
        TypeError, ValueError: a size of the wrong type or out of range, or a name of no table.
    """
    names = [table.name for table in tables]
    if isinstance(cache, Mapping):
        unknown = sorted(set(cache) - set(names))
        if unknown:
            raise ValueError(f"cache: no table is named {unknown}; the tables are {names}")
        for name, size in cache.items():
            _check_size(f"cache of table {name!r}", size)
    elif isinstance(cache, str):
        parse_bytes(cache, "cache")
    elif cache is not None:
        _check_size(f"cache of tables {names}", cache)


def _slots_of_table(table: TableConfig, size: CacheSize, record_bytes: int, batch: int) -> int:
    """Returns the number of slots of a table whose cache size is `size`; for a fraction, it is at least `batch`."""
    if isinstance(size, numbers.Integral):
        # num_embeddings of a hash table is an estimate: it does not limit an explicit number of rows.
        return int(size) if table.hashed else min(int(size), table.num_embeddings)
    if not isinstance(size, str):
        return max(math.ceil(size * table.num_embeddings), batch)
    where = f"cache of table {table.name!r}"
    slots = parse_bytes(size, where) // record_bytes
    if slots < 1:
        raise ValueError(f"{where}: {size!r} is less than one row record of {record_bytes} bytes")
    return min(slots, table.num_embeddings)


def _share_budget(
    tables: Sequence[TableConfig], record_bytes: Sequence[int], least: Sequence[int], budget: int, why: str
) -> list[int]:
    """Divides `budget` bytes among tables: all rows if they fit, else `least` rows each plus a proportional share."""
    sizes = [table.num_embeddings for table in tables]
    least = [min(need, rows) for need, rows in zip(least, sizes, strict=True)]
    floor = sum(rows * size for rows, size in zip(least, record_bytes, strict=True))
    if floor > budget:
        raise ValueError(
            f"cache: {why} allows {budget} bytes, two batches of the {len(tables)} tables need {floor}; "
            "enlarge it, or give cache= or a smaller batch_size"
        )
    wanted = sum((rows - need) * size for rows, need, size in zip(sizes, least, record_bytes, strict=True))
    fraction = min(1.0, (budget - floor) / wanted) if wanted else 1.0
    return [need + int((rows - need) * fraction) for rows, need in zip(sizes, least, strict=True)]


def cache_slots(
    tables: Sequence[TableConfig],
    record_bytes: Sequence[int],
    cache: CacheOption,
    hint: BatchHint,
    device_free: int,
    needed: Sequence[int] | None = None,
) -> list[int]:
    """Returns the number of cache slots of each table.

    Args:
        tables: the tables.
        record_bytes: bytes of a row's record in the cache, for each table.
        cache: the option. An int: rows per table. A float: a fraction of `num_embeddings`, at least a batch of `hint`.
            A str such as "2GiB": device memory of all tables together. A dict: one of these for each named table; None
            applies to the others. None: EMBCACHE_SIZE_ON_DEVICE_MEM or half of the free device memory, whichever is
            less, which must hold at least two batches of `hint`.
        hint: the largest batch.
        device_free: free device memory in bytes.
        needed: number of rows of each table that batches can need. It is a lower bound of the slots unless `cache` sets
            them: by an int, or by a str for one table.

    Raises:
        TypeError, ValueError: the option is invalid or cannot be met; the message names table and setting.
        MemoryError: the device has less free memory than the slots need.
    """
    check_cache_option(tables, cache)
    # For two batches: while one is trained, the rows of the next one, which is planned ahead, are pinned too.
    least, one_batch = hint.rows(tables, batches=2), hint.rows(tables, batches=1)
    if needed is not None:
        least, one_batch = ([max(pair) for pair in zip(rows, needed, strict=True)] for rows in (least, one_batch))
    budget = min(read_settings().embcache_size_on_device_mem, device_free // 2)
    why = "EMBCACHE_SIZE_ON_DEVICE_MEM (or half the free device memory)"
    if isinstance(cache, str):
        slots = _share_budget(tables, record_bytes, least, parse_bytes(cache, "cache"), f"cache={cache!r}")
    elif isinstance(cache, Mapping):
        slots = [
            _slots_of_table(table, cache[table.name], size, batch) if table.name in cache else 0
            for table, size, batch in zip(tables, record_bytes, one_batch, strict=True)
        ]
        rest = [index for index, rows in enumerate(slots) if rows == 0]
        left = max(0, budget - sum(rows * size for rows, size in zip(slots, record_bytes, strict=True)))
        unnamed = ([tables[i] for i in rest], [record_bytes[i] for i in rest], [least[i] for i in rest])
        for index, rows in zip(rest, _share_budget(*unnamed, left, why), strict=True):
            slots[index] = rows
    elif cache is None:
        slots = _share_budget(tables, record_bytes, least, budget, why)
    else:
        parts = zip(tables, record_bytes, one_batch, strict=True)
        slots = [_slots_of_table(table, cache, size, batch) for table, size, batch in parts]
    total = sum(rows * size for rows, size in zip(slots, record_bytes, strict=True))
    if total > device_free:
        raise MemoryError(
            f"cache: {total} bytes for tables {[table.name for table in tables]}, but the device has "
            f"{device_free} free; give a smaller cache="
        )
    return slots


def check_host_memory(tables: Sequence[TableConfig], row_bytes: Sequence[int]) -> None:
    """Checks that the host has enough memory for all rows of index tables, which are allocated from the start.

    Raises:
        MemoryError: the free host memory is too small.
    """
    pairs = list(zip(tables, row_bytes, strict=True))
    need = sum(table.num_embeddings * size for table, size in pairs if not table.hashed)
    free = available_memory()
    if need > free:
        names = [table.name for table in tables if not table.hashed]
        raise MemoryError(f"index tables {names} need {need} bytes of host memory, {free} are free")
