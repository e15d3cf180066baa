"""The host engine (built from torch_npu_ext/engine): id maps, host stores, the device cache's contents, swap plans.

Letters in shapes: K keys of the batch, F features, B samples, T tables, O rows out, I rows in, P and Q those of them
that have gradients in the open window. Slot numbers are the group's: table t owns a contiguous range of them, tables in
order.

After any exception the engine is as it was before the call. Methods are safe to call from several threads.

A test compares names, arguments and defaults here with the built module.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

_Bool: TypeAlias = npt.NDArray[np.bool_]
_Bytes: TypeAlias = npt.NDArray[np.uint8]
_Float: TypeAlias = npt.NDArray[np.float32]
_Int32: TypeAlias = npt.NDArray[np.int32]
_Int64: TypeAlias = npt.NDArray[np.int64]
_Int: TypeAlias = npt.NDArray[np.signedinteger[Any]]  # int32 or int64; another dtype is a TypeError

def available_memory() -> int:
    """Bytes of host memory that can still be taken: MemAvailable, or less where a cgroup (v1 or v2) says so."""

def cache_policies() -> list[str]:
    """Names of the policies that say which rows leave the cache, the default first."""

def set_parallel_runner(runner: int, threads: int, from_lookups: int = 8192) -> None:
    """Lets all engines work on several threads: `runner` is the address of a C function `void (int64_t count,
    void (*piece)(void* context, int64_t i), void* context)` that calls `piece(context, i)` for every i in [0, count),
    or 0: on one thread; `threads` is that of an `int64_t (void)` that says how many there are at the moment. Batches
    of less than `from_lookups` are planned on one thread anyway. Results do not depend on any of this. Not while an
    engine is at work.
    """

class CacheTooSmallError(RuntimeError):
    """A batch needs more distinct rows than the table's device cache has slots that are not pinned."""

class CapacityError(RuntimeError):
    """A hash table would hold more ids than its capacity."""

class Initializer:
    """How new weights are made; ValueError when the values make no sense.

    kind: "linear" (minimum + i / (D - 1) * (maximum - minimum)), "uniform" ([minimum, maximum)) or "truncated_normal"
    (mean, stddev; cut at two sigma). The values that the kind does not use are ignored.
    """

    def __init__(self, kind: str, minimum: float, maximum: float, mean: float, stddev: float) -> None: ...

class Life:
    """When an id of a hash table gets a row, and when it loses it; docs/life.md. 0 turns a rule off."""

    def __init__(
        self,
        *,
        admits: bool = False,
        threshold: float = 0.0,
        alpha: float = 1.0,
        beta: float = 0.0,
        decay: float = 1.0,
        evict_share: float = 0.0,
        evict_age: int = 0,
        evict_idle: int = 0,
        max_rows: int = 0,
    ) -> None: ...

class TableSpec:
    """One table. A hash table takes any int64 as id; in an index table the id is the row."""

    def __init__(
        self,
        *,
        name: str,
        hashed: bool,
        num_embeddings: int,
        slots: int,
        capacity: int,
        initializer: Initializer,
        seed: int,
        state_init: Sequence[float],
        bounds_check: str,
        columns: Sequence[str] = [],
        life: Life | None = None,
        store_path: str = "",
        stored_dtype: int | None = None,
    ) -> None:
        """slots: rows in the device cache. capacity: most ids of a hash table, 0 = unlimited.

        columns: what is kept of each row beside its record: "count", "last_use", "version", "score",
        "clicks", "timestamp".

        life: a table that admits ids has one more slot, behind those for rows: lookups of ids without a row read it.

        store_path: a file for the host store, which must not be there; it is removed with the engine. OSError from
        the engine where it cannot be made or has no room on the disk, before rows change. Empty: in memory.

        state_init: the initial value of each state block. bounds_check, for index tables: "fatal" (IndexError), or
        "warning", "ignore", "none" (such ids become 0; under "warning" they are reported by take_bounds_warnings).
        """

class Plan:
    """What one batch needs. Its slots are pinned until it is released or deleted.

    It is planned, then applying (from `begin` on the cache may have been written to, and the plan can only be
    completed), then applied; or it is cancelled. One that has ended before it began, with no later plan, is cancelled.
    """

    @property
    def arena(self) -> _Bytes:
        """The arrays that go to the device, a view that keeps their memory alive, also after release()."""

    @property
    def views(self) -> tuple[_Int32 | None, ...]:
        """The fields as int32 arrays that keep the arena."""

    @property
    def fields(self) -> tuple[tuple[int, int] | None, ...]:
        """(begin, words) of each array in `arena`, in units of 4 bytes, in the order of tbe.cache.plan.PlanArrays; None
        for an array that the batch does not need.
        """

    @property
    def serial(self) -> int:
        """The number of the plan; later plans have larger ones."""

    @property
    def sources(self) -> list[int]:
        """Serials of the plans that took out rows which this one brings in: they land before Engine.read_in."""

    @property
    def rows_out(self) -> int:
        """O."""

    @property
    def rows_in(self) -> int:
        """I."""

    @property
    def segment_lookups(self) -> int:
        """Lookups that read a row; the others are behind these in segment order."""

    @property
    def window_out(self) -> int:
        """P."""

    @property
    def window_in(self) -> int:
        """Q."""

    @property
    def bounds_warnings(self) -> list[tuple[str, int, int]]:
        """(table name, count, an example) of ids that were out of range, under "warning"."""

    @property
    def set_aside(self) -> list[tuple[str, int, int, int, int]]:
        """(table name, count, an id, its timestamp, the table's latest) of lookups with timestamps too far ahead."""

    @property
    def begun(self) -> bool:
        """Whether the cache may have been written to: such a plan can only be completed."""

    @property
    def applied(self) -> bool:
        """Whether the cache has the plan's rows."""

    @property
    def released(self) -> bool: ...
    def release(self) -> None:
        """Ends the pins of the plan's slots. Idempotent; deleting the plan releases it too."""

class Announcement:
    """A batch that will be planned later. Deleting it forgets it."""

    def forget(self) -> None:
        """The batch will not come. Idempotent, and nothing after the batch was planned."""

class ReadPlan:
    """Where the rows of some bags are. When all_resident, `index` holds cache slots. Otherwise it points into
    [the rows of resident_slots ; the host_count rows that Engine.read fills].
    """

    @property
    def offsets(self) -> _Int64:
        """[bags + 1] from 0."""

    @property
    def index(self) -> _Int32:
        """[lookups]."""

    @property
    def resident_slots(self) -> _Int32:
        """[R] distinct; empty when all_resident."""

    @property
    def host_count(self) -> int: ...
    @property
    def sources(self) -> list[int]:
        """Serials of the plans whose rows must land before Engine.read."""

    @property
    def all_resident(self) -> bool: ...

def begin(plans: Sequence[Plan]) -> None:
    """The caches will be written to: the plans, of several engines, can only be completed from now on. All or none.

    RuntimeError unless each is the oldest of its engine that is not applied.
    """

class Engine:
    """The tables of one record layout, which share a device cache and a plan.

    A batch: plan; read_sums and read_in, for which the rows of the plan's sources must have landed; begin; the cache is
    written to; applied; land, when the copy of the rows that left has arrived. Plans are applied in their order.

    `records` arguments are C-contiguous uint8 [rows, record_bytes], `sums` float32 [rows, 2 * dim] (sum, compensation);
    a wrong shape or dtype is a ValueError, and so is a plan of another engine. A table that is not there is an
    IndexError.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        dim: int,
        weight_dtype: int,
        state_elements: Sequence[int],
        feature_tables: Sequence[int],
        feature_columns: Sequence[int],
        feature_means: Sequence[bool],
        policy: str = "lru",
        serial: int = 0,
        row_ids: bool = False,
        state_dtypes: list[int] = [],
    ) -> None:
        """weight_dtype: 0 fp32, 1 fp16, 2 bf16. state_elements: dim or 1 for each state block.

        feature_tables: the table of each feature, ascending. feature_columns: the first output column of each feature,
        or [] for a sequence. feature_means: whether it is MEAN-pooled. serial: plans and versions are numbered
        behind it. row_ids: plans have the ids of their rows for the device.
        state_dtypes: of each state block, 0 (fp32), 1 (fp16) or 2 (bf16); empty: all fp32.
        """

    @property
    def record_bytes(self) -> int: ...

    # ---- batches

    def plan(
        self,
        values: _Int,
        offsets: _Int,
        feature_keys: _Int,
        batch_size: int,
        weighted: bool = False,
        joined: bool = False,
        arena: _Bytes | None = None,
        announced: Announcement | None = None,
        shows: _Int32 | None = None,
        clicks: _Int32 | None = None,
        timestamps: _Int64 | None = None,
        latest: _Int64 | None = None,
    ) -> Plan:
        """Plans a batch and pins its slots. Waits for no copy.

        values: [*] ids of all keys. offsets: [K*B + 1]. feature_keys: [F] which key each feature reads. weighted: the
        lookups of bags have weights. joined: the features of a sequence have one gradient, one after another. arena:
        memory for the plan's arrays, of arena_bytes() at least, which it keeps; None for memory of its own. announced:
        what announce() gave for the batch, which then no longer counts; after an exception it still does. shows,
        clicks, timestamps: of each of `values`, for tables that admit or evict ids; shows is 1 each if None. latest:
        [K] the latest timestamp of each key, where others than those of `values` count too.
        Raises CacheTooSmallError, CapacityError, IndexError (ids out of range), MemoryError, TypeError, ValueError.
        """

    def announce(self, values: _Int, offsets: _Int, feature_keys: _Int, batch_size: int) -> Announcement:
        """Says that the batch will be planned, after those announced before: a policy that looks ahead keeps its rows.

        It counts until it is planned or forgotten. Changes no row; other policies ignore it. RuntimeError when 16 were
        announced from the oldest on that still counts; TypeError, ValueError as from plan().
        """

    def arena_bytes(
        self,
        values: _Int,
        offsets: _Int,
        feature_keys: _Int,
        batch_size: int,
        weighted: bool = False,
        joined: bool = False,
    ) -> int:
        """What the arrays of the batch's plan take at the most."""

    def cancel(self, plan: Plan) -> None:
        """Undoes the newest plan and ends its pins, before it begins; so any suffix of the plans, newest first.

        Only the order in which rows will be evicted may differ from before. RuntimeError for any other plan.
        """

    def unapplied(self, upto: Plan | None = None) -> list[Plan]:
        """The plans to be applied before and with `upto`, or all, oldest first. Holding these does not pin.

        RuntimeError when `upto` was cancelled.
        """

    def applied(self, plan: Plan) -> None:
        """The cache holds what the plan brings in. RuntimeError unless it is the oldest, and has begun."""

    def in_flight(self) -> int:
        """Plans whose pins have not ended."""

    def read_in(self, plan: Plan, records: _Bytes, initial: bool = False) -> tuple[_Int32, _Int32]:
        """Fills the [I] records for the slots that the plan fills.

        Returns (places [m], their tables [m]) of those with initial values, if `initial`. RuntimeError before the
        plan's sources have landed.
        """

    def read_ahead(self, plan: Plan, records: _Bytes) -> _Int32:
        """Fills the records before the plan's sources have landed, but for the rows that they take out.

        Returns the places [m] of those, ascending. RuntimeError once the plan has begun or was cancelled.
        """

    def read_late(self, plan: Plan, places: _Int32, records: _Bytes) -> None:
        """Fills the [m] records of the rows at `places`, ascending. RuntimeError before the sources have landed."""

    def read_sums(self, plan: Plan, sums: _Float) -> None:
        """Fills the [Q] sums of rows that come back. RuntimeError once the plan is applied or cancelled."""

    def land(self, plan: Plan, records: _Bytes, sums: _Float | None = None) -> None:
        """Stores the [O] records of the rows that the plan took out, and their [P] sums, needed when P > 0.

        The plan may be released already; landing twice does nothing. RuntimeError before the plan has begun.
        """

    def landed(self, plan: Plan) -> bool:
        """Whether no row that the plan took out is on its way to the store."""

    def find(
        self, values: _Int, offsets: _Int, feature_keys: _Int, batch_size: int, bag_begin: int, bag_end: int
    ) -> ReadPlan:
        """Where the rows of the group's bags [bag_begin, bag_end) are. Changes nothing, apart from bounds warnings.

        RuntimeError before all plans are applied.
        """

    def bag_ranges(self, offsets: _Int, feature_keys: _Int, batch_size: int, max_lookups: int) -> _Int64:
        """Boundaries 0 = b0 < b1 < ... = F*B of runs of bags with at most max_lookups lookups each, or one bag."""

    def read(self, read_plan: ReadPlan, records: _Bytes) -> tuple[_Int32, _Int32]:
        """Fills the [host_count] host rows. Returns (places [m], their tables [m]) of those with initial values.

        RuntimeError before its sources have landed.
        """

    # ---- the accumulation window; from window_slots on, all plans must be applied and rows landed, else RuntimeError

    def mark(self, plan: Plan, slots: _Int32 | None = None) -> None:
        """The plan's rows, or those in `slots`, which are some of them, have sums from now on.

        RuntimeError after the plan's release.
        """

    def window_open(self) -> bool:
        """Whether any row has a sum."""

    def window_slots(self) -> tuple[_Int32, _Int32]:
        """Resident rows with sums: slots [n], ascending, and table_offsets [T + 1]."""

    def window_away(self) -> tuple[_Int64, _Int32]:
        """Rows with sums that left the cache: rows [n], ascending within a table; table_offsets [T + 1]."""

    def read_away(self, begin: int, end: int, records: _Bytes, sums: _Float) -> None:
        """Fills records and sums of the begin-th to end-th row of window_away. IndexError beyond them."""

    def write_away(self, begin: int, end: int, records: _Bytes) -> None:
        """Stores the records of the begin-th to end-th row of window_away. IndexError beyond them."""

    def close_window(self) -> None:
        """Ends the window: no row has a sum."""

    # ---- whole tables: all plans must be applied and all rows landed, else RuntimeError

    def row_count(self, table: int) -> int:
        """Ids known (hash table) or num_embeddings (index table). Needs nothing applied or landed."""

    def table_rows(self, table: int) -> tuple[_Int64, _Int32]:
        """Ids [n] by ascending row, and slots [n], -1 = not resident. Rows have gaps once ids were removed."""

    def kept_ids(self, table: int) -> _Int64:
        """Ids [n], by ascending row, of rows with more than their initial record: in the cache, or in the store."""

    def changed_ids(self, table: int, since: int) -> tuple[_Int64, int]:
        """Ids [n], by ascending row, of rows that changed after version `since`; how many rows were looked at for it.

        Those that changed since the `next_version` before `since`, or all rows where these are too many.
        ValueError for a table without the column "version".
        """

    def version(self) -> int:
        """What changes from now on is of a later version. Needs nothing applied or landed."""

    def find_rows(self, table: int, ids: _Int64) -> tuple[_Int64, _Int32]:
        """Rows [n], -1 = not known, and slots [n], -1 = not resident. IndexError for ids that an index table lacks."""

    def others(self, table: int, ids: _Int64) -> _Int64:
        """Ids [n] that the table has beside these, by ascending row."""

    def read_rows(self, table: int, ids: _Int64, rows: _Int64, records: _Bytes) -> None:
        """Fills host records of rows [n] and their ids. Resident rows are stale: overlay those of the cache."""

    def insert(self, table: int, ids: _Int64) -> tuple[_Int64, _Int32]:
        """Rows [n] and slots [n] (-1 = not resident) of the ids; a hash table adds those it does not know.

        CapacityError, MemoryError; IndexError for ids that an index table lacks.
        """

    def reserve_rows(self, table: int, rows: _Int64) -> None:
        """Takes the memory of rows [n], so that write_rows cannot fail. MemoryError, IndexError."""

    def write_rows(self, table: int, ids: _Int64, rows: _Int64, records: _Bytes) -> None:
        """Stores host records of rows [n] and their ids. Resident rows must be written to the cache as well."""

    def remove(self, table: int, ids: _Int64, candidates: bool = True) -> int:
        """Takes ids out of a hash table, or makes rows of an index table initial; how many it knew.

        candidates: what was counted of them before they had a row is forgotten as well.
        RuntimeError, with nothing removed, while batches in flight use one of the rows, or one has a sum of the
        window; IndexError for ids that an index table lacks.
        """

    def clear_table(self, table: int) -> None:
        """Forgets all rows, with their sums. RuntimeError while a batch in flight uses one."""

    def initial_records(self, table: int, ids: _Int64, records: _Bytes) -> None:
        """Fills the [n] records that the ids start from. Needs nothing applied or landed."""

    # ---- saves; as for whole tables

    def scan_ids(self, table: int, begin: int, least: int) -> tuple[_Int64, int]:
        """Ids of a hash table from bucket `begin` on, `least` or somewhat more, in no order; where to go on, -1 at
        the end. ValueError for an index table.
        """

    def reserve_ids(self, table: int, extra: int) -> None:
        """Room for so many more ids of a hash table, which may then come in the order of scan_ids. MemoryError."""

    def removed_ids(self, table: int, since: int) -> tuple[_Int64, bool]:
        """Ids [n], ascending, that were removed after version `since`, with those that came back; whether that is all.

        ValueError for a table without the column "version".
        """

    def forget_changes(self, table: int, upto: int) -> None:
        """Nobody will ask for what was removed before this version. Needs nothing applied or landed."""

    def next_version(self) -> int:
        """As version(); where no batch is in flight, no row is of a later version yet."""

    def window_ids(self, table: int) -> _Int64:
        """Ids [n] of the table's rows with sums: those of window_slots, then those of window_away, in their order."""

    def put_away(self, table: int, rows: _Int64, sums: _Float) -> None:
        """Gives rows [n] that are not in the cache sums [n, 2 * dim]. IndexError for others, or those with sums."""

    # ---- snapshots: the rows of one moment, taken while batches go on

    def open_snapshot(self, table: int, ids: _Int64 | None = None) -> int:
        """Rows of `ids` [n], or all, are pending as they are now; how many. All must be settled.

        Who changes a pending row takes it before; of plans that count it the engine keeps the old columns.
        RuntimeError for a table that has one.
        """

    def close_snapshot(self, table: int) -> None:
        """Nothing is pending; also where there is no snapshot."""

    def snapshot_pending(self, table: int) -> int:
        """Rows not taken yet. RuntimeError without a snapshot, here and in the calls that take."""

    def take_ids(self, table: int, ids: _Int64) -> tuple[_Int64, _Int32, npt.NDArray[Any], dict[str, npt.NDArray[Any]]]:
        """Takes those of `ids` [n] that are pending, and that no plan moves: ids, slots or -1, records, columns.

        Records are uint8 [m, record_bytes], unset for rows with a slot, and [0, record_bytes] where all have one: the
        caller reads the cache before others do anything with it.
        """

    def take_slots(
        self, table: int, slots: _Int32
    ) -> tuple[_Int64, _Int32, npt.NDArray[Any], dict[str, npt.NDArray[Any]]]:
        """The same of rows in these slots [n] of the group, which plans in flight hold; those of other tables stay."""

    def take_next(
        self, table: int, begin: int, least: int
    ) -> tuple[tuple[_Int64, _Int32, npt.NDArray[Any], dict[str, npt.NDArray[Any]]], int]:
        """The same from a place on, 0 at first, at least so many rows; and the place to go on from, or -1.

        To be called from 0 on again until no row is pending: those that moved meanwhile may be left.
        """

    def leaving_ids(self, table: int, intervals: Sequence[int] | None = None) -> _Int64:
        """Ids [n] that evict would take out now, or end_step with these intervals. All must be settled."""

    # ---- the life of ids; write, candidates, set and evict need all plans applied and all rows landed

    def evicts(self, intervals: Sequence[int]) -> bool:
        """Whether end_step would look for ids that leave. Plans that have not begun do not count."""

    def end_step(self, intervals: Sequence[int]) -> int:
        """A training step has ended; how many ids left: every intervals[t] steps (0: never) by the table's rules, and
        those beyond its bound. RuntimeError if evicts() and not all plans are applied and all rows landed.
        """

    def evict(self, table: int) -> int:
        """Takes out ids by the table's rules now. Rows in flight or in the window stay."""

    def take_large_evictions(self) -> list[tuple[str, int, int, int]]:
        """(table name, rows that left, of so many, latest timestamp) of the latest eviction of each table since the
        last call that took more than half of it, and more than its share.
        """

    def read_columns(self, table: int, rows: _Int64) -> dict[str, npt.NDArray[Any]]:
        """What is kept of rows [n], of: count, last_use, clicks, timestamp (int64 [n]), score (float64 [n])."""

    def write_columns(self, table: int, rows: _Int64, columns: dict[str, npt.NDArray[Any]]) -> None:
        """Sets these. KeyError for a column that is not kept, ValueError for a wrong length or range."""

    def candidates(self, table: int) -> tuple[_Int64, dict[str, npt.NDArray[Any]]]:
        """Ids [n], ascending, that were seen and have no row, and columns [n] as of rows."""

    def set_candidates(self, table: int, ids: _Int64, columns: dict[str, npt.NDArray[Any]]) -> None:
        """These and no others. KeyError and ValueError as write_columns; ValueError for a table without admission."""

    def clock(self, table: int) -> tuple[int, int, int]:
        """(batches planned, steps ended, latest timestamp)."""

    def set_clock(self, table: int, batches: int, steps: int, timestamp: int) -> None: ...

    # ---- reports

    def stats(self, table: int | None = None) -> dict[str, int]:
        """Of a table, or of all: batches, lookups, unique_rows, unique_misses, new_rows, rows_in, rows_out, bytes_in,
        bytes_out, bounds_errors, largest_batch (the most unique rows that a batch had of one table), admitted (ids that
        got a row where not all do), not_admitted_lookups, and evicted (ids).
        """

    def pinned(self, table: int | None = None) -> int:
        """Slots that batches in flight hold."""

    def reset_stats(self) -> None: ...
    def memory(self, table: int | None = None) -> dict[str, int]:
        """Of a table, or of all: id_map_bytes, store_bytes (of memory), disk_bytes, column_bytes (of what options keep
        per row, with the logs of what changed and left), rows, candidates, candidate_bytes.
        """

    def set_memory_limit(self, bytes: int) -> None:
        """Caps what the host stores may commit, below what the machine and its cgroup have free."""

    def take_bounds_warnings(self) -> list[tuple[str, int, int]]:
        """(table name, count, an example) of ids that reads found out of range since the last call, under "warning"."""

class UniqueBatch:
    """A rank's batch as the ranks of a sharded collection see it, of W ranks and T tables: each id of a table once.

    Rows come back in the order of `ids`, those of the tables of a group in one tensor.
    """

    @property
    def ids(self) -> _Int64:
        """[U] of each rank, and there of each table, in the order in which they came."""

    @property
    def repeats(self) -> _Int32:
        """[U] lookups of each of `ids`."""

    @property
    def counts(self) -> _Int64:
        """[W, T] ids."""

    @property
    def lookups(self) -> _Int64:
        """[W, T] lookups of them."""

    @property
    def numbers(self) -> _Int32:
        """What each of `ids` takes along, in their order: the words that its table asked for. For `received`."""

    @property
    def latest(self) -> _Int64:
        """[T] the latest timestamp of each table in the batch, -2**63 where there is none, or with `numbers` off."""

    @property
    def out_of_range(self) -> list[tuple[int, int, int]]:
        """Index tables that have no such ids, which read row 0: (table, how many, one of them)."""

    def rows(self, group: int) -> int:
        """Rows that the tables of a group receive. IndexError: there is no such group."""

    def feature_lookups(self, group: int) -> list[int]:
        """Lookups of each feature of a group."""

    def slots(self, group: int) -> tuple[_Int32, tuple[tuple[int, int] | None, ...]]:
        """An arena of int32 words and, for each array in it, None or (first word, words), N lookups feature by feature:
        slots int32 [N], the received row; offsets int64 [F * B + 1] of the bags, pooled; source int64 [N], where a
        lookup is in the batch's values, None when they are all of them in order.
        """

    def segments(self, group: int) -> tuple[_Int32, tuple[tuple[int, int] | None, ...]]:
        """The same of lookups sorted by received row, U rows: segment_offsets int32 [U + 1]; grad_row int32 [N], the
        lookup, or the sample when pooled; grad_column int32 [N], pooled; scale float32 [N], with a MEAN feature;
        positions int32 [N], the lookup, weighted bags; hot_segments int32 [H, 4], None if H is 0. Not from two threads
        at a time.
        """

class Deduplicator:
    """Removes duplicates from batches of a sharded collection. Safe to call from several threads."""

    def __init__(
        self,
        num_embeddings: Sequence[int],
        homes: Sequence[int],
        groups: Sequence[int],
        feature_tables: Sequence[int],
        feature_columns: Sequence[int],
        feature_means: Sequence[bool],
        world_size: int,
        numbers: Sequence[int] | None = None,
    ) -> None:
        """num_embeddings, homes, groups: of each table: rows of an index table, 0 for a hash table; the rank of all
        ids, -1 for rank id mod world_size, by floor; whose rows are received in one tensor.

        feature_tables, feature_columns, feature_means: of each feature, ordered by table. The last two are empty for
        sequences.

        numbers: what a table's ids take along, a sum: 1 for how often the rank saw it, 2 for its clicks, 4 for its last
        timestamp. None: nothing.
        """

    @property
    def number_words(self) -> _Int64:
        """[T] int32 words of `UniqueBatch.numbers` that each id of a table takes."""

    def run(
        self,
        values: _Int,
        offsets: _Int,
        feature_keys: _Int,
        batch_size: int,
        weighted: bool = False,
        segments: bool = True,
        numbers: bool = False,
        clicks: _Int32 | None = None,
        timestamps: _Int64 | None = None,
    ) -> UniqueBatch:
        """As for `Engine.plan`. Without `segments`, those are made when they are asked for. numbers: the ids take along
        what their tables ask for. ValueError: a table wants clicks or timestamps, and there are none.
        """

    def received(
        self, counts: _Int64, ids: _Int64, numbers: _Int32
    ) -> tuple[_Int32 | None, _Int32 | None, _Int64 | None]:
        """shows, clicks and timestamps [n] of the ids [n] of all ranks, rank by rank and there table by table, from the
        `numbers` that they took along; None for what no table asks for. counts: [W, T] ids.

        An id that several ranks have has the same timestamp everywhere: that of its last lookup in the batch of all
        ranks, by feature, then rank. ValueError: sizes that do not fit.
        """

class IndexWriter:
    """Writes the index of a table in a save, id -> file and row. What is added later replaces what is there."""

    def __init__(self, path: str, most_ids: int, save: str) -> None:
        """path: of a new file. save: the save's id, 32 characters. OSError where the disk has no room."""

    def add(self, ids: _Int64, file: int, first_row: int) -> None:
        """Ids [n] of rows first_row and following of the file of this number. ValueError beyond most_ids."""

    def remove(self, ids: _Int64) -> None:
        """Ids [n] that are rows no more."""

    def finish(self) -> None:
        """Until the index is on the disk."""

class ServedTable:
    """Weights of a table in saves, mapped read-only. Lookups may run on several threads."""

    def __init__(self, saves: Sequence[tuple[str, str, Sequence[tuple[str, int, int]]]], row_bytes: int) -> None:
        """saves: the newest first: index file, id of the save, and of each file of rows its path, the first byte of its
        weights and their number.

        OSError, or ValueError for files that are damaged or of another save.
        """

    def lookup(self, ids: _Int64, missing: _Bytes, out: _Bytes) -> _Bool:
        """Fills out [n, row_bytes] with the weights of ids [n], or `missing` [row_bytes]; gives which were there.

        ValueError for a damaged index.
        """
