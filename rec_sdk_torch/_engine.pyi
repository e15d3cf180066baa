"""The host engine (built from torch_npu_ext/host): id maps, host stores, the device cache's contents, swap plans.

Letters in shapes: N lookups of the group, K keys of the batch, F features, B samples, U unique rows, T tables, O rows
out, I rows in. Slot numbers are the group's: table t owns a contiguous range of them, tables in order.

After any exception the engine is as it was before the call. Methods are safe to call from several threads.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

_Bytes: TypeAlias = npt.NDArray[np.uint8]
_Float: TypeAlias = npt.NDArray[np.float32]
_Int32: TypeAlias = npt.NDArray[np.int32]
_Int64: TypeAlias = npt.NDArray[np.int64]
_Int: TypeAlias = npt.NDArray[np.signedinteger[Any]]  # int32 or int64; another dtype is a TypeError

def available_memory() -> int:
    """Bytes of host memory that can still be taken: MemAvailable, or less where a cgroup (v1 or v2) says so."""

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
    ) -> None:
        """slots: rows in the device cache. capacity: most ids of a hash table, 0 = unlimited.

        state_init: the initial value of each state block. bounds_check, for index tables: "fatal" (IndexError), or
        "warning", "ignore", "none" (such ids become 0; under "warning" they are reported by take_bounds_warnings).
        """

class SwapPlan:
    """What one batch needs. The arrays are views that keep the plan's memory alive, also after release()."""

    @property
    def slots(self) -> _Int32:
        """[N] cache slot of each lookup."""

    @property
    def offsets(self) -> _Int64 | None:
        """[F*B + 1] the group's bags, feature-major; None for a sequence."""

    @property
    def unique_slots(self) -> _Int32:
        """[U] slots of the distinct rows, tables in order; the rows of a table are in no order."""

    @property
    def table_offsets(self) -> _Int32:
        """[T + 1] unique rows of each table."""

    @property
    def segment_offsets(self) -> _Int32:
        """[U + 1] the lookups of each unique row, in segment order."""

    @property
    def positions(self) -> _Int32 | None:
        """[N] segment order -> lookup, for weighted bags; None for others. Lookups of one row keep their order."""

    @property
    def grad_row(self) -> _Int32:
        """[N] in segment order, the row of the output gradient: the lookup for a sequence, the sample when pooled."""

    @property
    def grad_column(self) -> _Int32 | None:
        """[N] in segment order, the first column of the output gradient; None for a sequence."""

    @property
    def scale(self) -> _Float | None:
        """[N] in segment order, 1 / length of the bag for MEAN, else 1; None when no feature is MEAN."""

    @property
    def rows_out(self) -> int:
        """O."""

    @property
    def rows_in(self) -> int:
        """I."""

    @property
    def swap_out_slots(self) -> _Int32:
        """[O] slots whose rows leave; hand their records to Engine.write_back."""

    @property
    def swap_in_slots(self) -> _Int32:
        """[I] slots to fill with the records of Engine.read_in."""

    @property
    def pending_out(self) -> _Int32:
        """[P] indices into swap_out_slots of rows with pending gradients, for Engine.write_pending."""

    @property
    def pending_in(self) -> _Int32:
        """[Q] indices into swap_in_slots of rows with pending gradients, from Engine.read_pending."""

    @property
    def released(self) -> bool: ...
    def release(self) -> None:
        """Ends the pins of the plan's slots. Idempotent; deleting the plan releases it too."""

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
    def all_resident(self) -> bool: ...

class Engine:
    """The tables of one record layout, which share a device cache and a plan.

    `records` arguments are C-contiguous uint8 [rows, record_bytes], `sums` float32 [rows, 2 * dim] (sum, compensation);
    a wrong shape or dtype is a ValueError.
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
    ) -> None:
        """weight_dtype: 0 fp32, 1 fp16, 2 bf16. state_elements: dim or 1 for each state block.

        feature_tables: the table of each feature, ascending. feature_columns: the first output column of each feature,
        or [] for a sequence. feature_means: whether it is MEAN-pooled.
        """

    @property
    def record_bytes(self) -> int: ...
    def plan(
        self, values: _Int, offsets: _Int, feature_keys: _Int, batch_size: int, weighted: bool = False
    ) -> SwapPlan:
        """Plans a batch and pins its slots.

        values: [*] ids of all keys. offsets: [K*B + 1]. feature_keys: [F] which key each feature reads.
        Its swap: read_in (and read_pending), and write_back (and write_pending), in any order. The rows that leave
        have to be written back before anything else asks for them: the next plan, a read, whole tables.
        Raises CacheTooSmallError, CapacityError, IndexError (ids out of range), MemoryError, TypeError, ValueError.
        """

    def cancel(self, plan: SwapPlan) -> None:
        """Undoes the latest plan and ends its pins, before the cache was written to.

        Only the order in which rows will be evicted may differ from before. RuntimeError for any other plan.
        """

    def find(
        self, values: _Int, offsets: _Int, feature_keys: _Int, batch_size: int, bag_begin: int, bag_end: int
    ) -> ReadPlan:
        """Where the rows of the group's bags [bag_begin, bag_end) are. Changes nothing, apart from bounds warnings."""

    def bag_ranges(self, offsets: _Int, feature_keys: _Int, batch_size: int, max_lookups: int) -> _Int64:
        """Boundaries 0 = b0 < b1 < ... = F*B of runs of bags with at most max_lookups lookups each, or one bag."""

    def read(self, read_plan: ReadPlan, records: _Bytes) -> tuple[_Int32, _Int32]:
        """Fills the [host_count] host rows. Returns (places [m], their tables [m]) of those with initial values."""

    def write_back(self, plan: SwapPlan, records: _Bytes) -> None:
        """Stores the [O] records of plan.swap_out_slots. The plan may be released already."""

    def read_in(self, plan: SwapPlan, records: _Bytes) -> tuple[_Int32, _Int32]:
        """Fills the [I] records for plan.swap_in_slots.

        Returns (places [m], their tables [m]) of those with initial values.
        """

    def write_pending(self, plan: SwapPlan, sums: _Float) -> None:
        """Keeps the [P] sums of rows that leave."""

    def read_pending(self, plan: SwapPlan, sums: _Float) -> None:
        """Fills the [Q] sums of rows that came back. RuntimeError after the plan's release or clear_pending."""

    def mark_pending(self, plan: SwapPlan) -> None:
        """The plan's rows now hold pending gradients. RuntimeError after the plan's release."""

    def pending_slots(self) -> tuple[_Int32, _Int32]:
        """Resident rows with pending gradients: slots [n], ascending within a table, and table_offsets [T + 1]."""

    def pending_away(self) -> tuple[_Int64, _Int32]:
        """Rows with pending gradients that left the cache: rows [n], ascending within a table; table_offsets [T + 1].

        Their updated records go to `write_rows`.
        """

    def read_away(self, begin: int, end: int, records: _Bytes, sums: _Float) -> None:
        """Fills records and sums of the begin-th to end-th row of pending_away."""

    def clear_pending(self) -> None:
        """Ends the window: no row has pending gradients."""

    def row_count(self, table: int) -> int:
        """Ids known (hash table) or num_embeddings (index table)."""

    def table_rows(self, table: int) -> tuple[_Int64, _Int32]:
        """Ids [n] in row order, which for hash tables is the order of arrival, and slots [n], -1 = not resident."""

    def read_rows(self, table: int, ids: _Int64, rows: _Int64, records: _Bytes) -> None:
        """Fills host records of rows [n] and their ids. Resident rows are stale: overlay those of the cache."""

    def kept_rows(self, table: int) -> _Int64:
        """Rows [n] with more than their initial record, ascending: those in the cache or written to the store."""

    def insert(self, table: int, ids: _Int64) -> tuple[_Int64, _Int32]:
        """Rows [n] and slots [n] (-1 = not resident) of the ids; a hash table adds those it does not know."""

    def write_rows(self, table: int, rows: _Int64, records: _Bytes) -> None:
        """Stores host records. Resident rows must be written to the cache as well."""

    def clear_table(self, table: int) -> None:
        """Forgets all rows. RuntimeError while a batch in flight uses one."""

    def initial_records(self, table: int, ids: _Int64, records: _Bytes) -> None:
        """Fills the [n] records that the ids start from."""

    def stats(self) -> dict[str, int]:
        """Counts: batches, lookups, unique_rows, unique_misses, new_rows, rows_in, rows_out, bytes_in, bytes_out,
        bounds_errors.
        """

    def reset_stats(self) -> None: ...
    def memory(self) -> dict[str, int]:
        """id_map_bytes, store_bytes (committed), rows."""

    def set_memory_limit(self, bytes: int) -> None:
        """Caps what the host stores may commit, below what the machine and its cgroup have free."""

    def take_bounds_warnings(self) -> list[tuple[str, int, int]]:
        """(table name, count, an example) of ids that were out of range since the last call, under "warning"."""
