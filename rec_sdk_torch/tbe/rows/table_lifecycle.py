"""The part of a table view that handles the lifecycle of ids: row columns, candidates, sketch, clocks, eviction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from ...runtime.exits import calls
from ...runtime.numbers import as_int
from ..cache.batch import Int64Array
from ..cache.device_cache import Group
from ..cache.evicted import EvictedRows, RowSchema
from ..cache.eviction import evict
from ..config.lifecycle import NEVER
from ..config.table import TableConfig
from .layout import Layout
from .user_tensors import columns_to_host, ids_to_host, to_host

INITIAL_CLOCKS = {"batches": 0, "steps": 0, "timestamp": NEVER}
"""The clocks of a new table."""
CLOCKS = tuple(INITIAL_CLOCKS)
"""Names of the clocks, in the engine's order."""


class LifecycleView:
    """The part of a table view that reads and changes counts, candidates and clocks, and evicts ids.

    Attributes:
        layout: the layout of the table's embedding.
        config: the table's config.
    """

    layout: Layout
    config: TableConfig

    def locate(self) -> tuple[Group, int]:
        """Settles the swap of the table's group; returns the group, and the table's index in the group."""
        group, table = self.layout.find_table(self.config.name)
        group.swap.settle()
        return group, table

    def row_columns(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the columns that the table's rules keep for rows; empty without a `TableLifecycle`.

        Args:
            ids: int64 `[n]`, all of which must have rows.

        Returns:
            Columns by name: `count`, `last_use` (the clock `batches` modulo 2^32), `clicks` and `timestamp`, int64
            `[n]`, and `score`, float64 `[n]`; only columns that the rules need.

        Raises:
            KeyError: an id has no row.
        """
        with self.layout.locks.exclusive():
            group, table = self.locate()
            columns = group.engine.lifecycle.read_columns(table, self._rows_of(group, table, ids))
        return {name: torch.from_numpy(values) for name, values in columns.items()}

    def write_row_columns(self, ids: torch.Tensor, columns: Mapping[str, torch.Tensor]) -> None:
        """Writes columns of rows; other columns do not change. See `row_columns`.

        Args:
            ids: int64 `[n]`, all of which must have rows.
            columns: values by name, `[n]` each.

        Raises:
            KeyError: an id has no row, or the table keeps no such column; nothing was written.
            ValueError: the length of a column differs from the length of `ids`, or a value is out of range.
            TypeError: values of the wrong type.
        """
        arrays = columns_to_host(self.config.name, columns)
        with self.layout.locks.exclusive():
            group, table = self.locate()
            rows = self._rows_of(group, table, ids)
            group.before_change(table, ids_to_host(self.config.name, ids))
            group.engine.lifecycle.write_columns(table, rows, arrays)

    def candidates(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns the candidates, which are ids that were looked up but are not admitted yet, with their counts.

        Returns:
            Ids, int64 `[n]`, ascending; and columns by name, int64 `[n]`: `count`, `last_use`, and `clicks` and
            `timestamp` if the table's rules need them.
        """
        with self.layout.locks.exclusive():
            group, table = self.locate()
            ids, columns = group.engine.lifecycle.candidates(table)
        return torch.from_numpy(ids), {name: torch.from_numpy(values) for name, values in columns.items()}

    def set_candidates(self, ids: torch.Tensor, columns: Mapping[str, torch.Tensor]) -> None:
        """Replaces all candidates of the table.

        Args:
            ids: int64 `[n]`, distinct ids without rows.
            columns: columns by name, `[n]`; see `candidates`. Missing columns have defaults: the
                table's clocks for `last_use` and `timestamp`, 0 for `clicks`.

        Raises:
            KeyError, ValueError: invalid columns, duplicate ids, ids that have rows, or a table that admits every id;
                nothing was changed.
            TypeError: ids or values of the wrong type.
        """
        candidates, arrays = ids_to_host(self.config.name, ids), columns_to_host(self.config.name, columns)
        twice = len(candidates) - len(np.unique(candidates))
        if twice:
            raise ValueError(f"table {self.config.name!r}: {twice} of the candidates are duplicates")
        with self.layout.locks.exclusive():
            group, table = self.locate()
            rows = candidates[group.engine.tables.find_rows(table, candidates)[0] >= 0]
            if len(rows):
                raise ValueError(f"table {self.config.name!r}: {len(rows)} candidates (such as {rows[0]}) have rows")
            group.engine.lifecycle.set_candidates(table, candidates, arrays)

    def sketch(self) -> torch.Tensor:
        """Returns the state of the table's sketch for `set_sketch`, uint8 `[n]`; empty without a sketch."""
        with self.layout.locks.exclusive():
            group, table = self.locate()
            return torch.from_numpy(group.engine.lifecycle.sketch(table))

    def set_sketch(self, states: Sequence[torch.Tensor]) -> None:
        """Replaces the table's sketch by one in which each count is at least as large as in the sketches `states`.

        Args:
            states: results of `sketch`, uint8 `[n]` each. The sketches may have other sizes and depths. If there are
                several, each id must have been counted in only one of them, as on the ranks of a sharded table.

        Raises:
            ValueError: an invalid state, or a table without a sketch; nothing was changed.
            TypeError: values of the wrong type.
        """
        if not isinstance(states, Sequence):
            raise TypeError(
                f"table {self.config.name!r}: the states of sketches are {type(states).__name__}, expected a list of "
                "tensors, uint8 [n]"
            )
        for state in states:
            if not isinstance(state, torch.Tensor):
                raise TypeError(
                    f"table {self.config.name!r}: the state of a sketch is {type(state).__name__}, expected a tensor, "
                    "uint8 [n]"
                )
            if state.dtype != torch.uint8 or state.dim() != 1:
                raise TypeError(
                    f"table {self.config.name!r}: the state of a sketch is {state.dtype} {tuple(state.shape)}, "
                    "expected uint8 [n]"
                )
        with self.layout.locks.exclusive():
            group, table = self.locate()
            group.engine.lifecycle.set_sketch(table, [to_host(state).numpy() for state in states])

    def clocks(self) -> dict[str, int]:
        """Returns the table's clocks: training `batches`, `steps` (backward passes) and the latest `timestamp`."""
        with self.layout.locks.exclusive():
            group, table = self.locate()
            return dict(zip(CLOCKS, group.engine.lifecycle.clock(table), strict=True))

    def set_clocks(self, clocks: Mapping[str, int]) -> None:
        """Sets clocks by name; other clocks do not change.

        If rows or candidates have later timestamps, the next eviction lowers them to the clock `timestamp`.

        Raises:
            KeyError: there is no clock of a given name.
            ValueError: a value that is not an int, or is out of range.
        """
        unknown = sorted(set(clocks) - set(CLOCKS))
        if unknown:
            raise KeyError(f"table {self.config.name!r} has no clocks {unknown}, only {list(CLOCKS)}")
        for name, value in clocks.items():
            least = NEVER if name == "timestamp" else 0
            number = as_int(value)
            if number is None or not least <= number < 2**63:
                raise ValueError(
                    f"table {self.config.name!r}: clock {name!r} is {value!r}, must be an int from {least} to 2**63 - 1"
                )
        with self.layout.locks.exclusive():
            group, table = self.locate()
            now = dict(zip(CLOCKS, group.engine.lifecycle.clock(table), strict=True)) | dict(clocks)
            group.engine.lifecycle.set_clock(table, *(now[name] for name in CLOCKS))

    def evict(self) -> int:
        """Evicts the ids that the table's rules choose now; returns how many had rows.

        Rows of batches in flight and rows with accumulated gradients stay until a later eviction.
        """
        with self.layout.locks.exclusive():
            group, table = self.locate()
            evicted = evict(group, table)
        group.warn_of_evictions()
        return evicted

    def copy_shard_lifecycle(
        self, old: LifecycleView, ids: torch.Tensor, owned: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Copies row columns, clocks, the sketch, and the candidates that this shard owns from an unsharded table.

        Args:
            old: the view of the unsharded table.
            ids: ids of the rows of this shard.
            owned: a function of ids, int64 `[n]`, that returns for each id whether this shard owns it, bool `[n]`.
        """
        self.write_row_columns(ids, old.row_columns(ids))
        self.set_clocks(old.clocks())
        candidates, columns = old.candidates()
        mask = owned(candidates)
        self.set_candidates(candidates[mask], {name: values[mask] for name, values in columns.items()})
        sketch = old.sketch()
        if len(sketch):
            self.set_sketch([sketch])

    # ---- evicted rows

    def take_evicted(self, at_most: int | None = None) -> EvictedRows:
        """Returns evicted rows, the oldest first, and removes them from the table's buffer.

        A table keeps evicted rows if its `TableLifecycle` has `keep_evicted`.

        Args:
            at_most: maximum number of rows; None for all.

        Raises:
            RuntimeError: the table keeps no evicted rows.
            ValueError: `at_most` is not an int of at least 0.
        """
        number = None if at_most is None else as_int(at_most)
        if at_most is not None and (number is None or number < 0):
            raise ValueError(f"table {self.config.name!r}: at_most is {at_most!r}, must be None or an int >= 0")
        buffer = self.layout.evicted.get(self.config.name)
        if buffer is None:
            raise RuntimeError(
                f"table {self.config.name!r} keeps no evicted rows: set keep_evicted=True in its "
                "AdmitAndEvictConfig (TableLifecycle)"
            )
        # Interrupted work is not completed first: it may fail for lack of memory, and this call can free memory.
        with calls, self.layout.locks.launch:
            taken = self.row_schema().concatenate(buffer.first_rows(number))
            buffer.drop_first(len(taken))
        return taken

    def pending_evicted_rows(self, after: int = -1) -> list[EvictedRows]:
        """Returns the rows that `take_evicted` would return, without removing them. The caller holds `exclusive()`.

        Args:
            after: only rows of evictions with a larger serial number are returned.
        """
        buffer = self.layout.evicted.get(self.config.name)
        if buffer is None or not buffer.chunks:
            return []
        shape = self.row_schema()
        return [shape.fit(rows) for serial, rows in buffer.chunks if serial > after]

    def row_schema(self, clocks: Mapping[str, int] = INITIAL_CLOCKS) -> RowSchema:
        """Returns the current parts and columns of the table's rows, with the values of a row created at `clocks`."""
        config, optimizer = self.config, self.layout.optimizer_of(self.config.name)
        weight = torch.empty((0, config.embedding_dim), dtype=config.weight_dtype, device="cpu")
        states: dict[str, torch.Tensor] = {}
        if optimizer is not None:
            initial = optimizer.spec.state_init(optimizer.options)
            for state, value in zip(optimizer.spec.states, initial, strict=True):
                shape, dtype = (1, state.elements(config.embedding_dim)), optimizer.state_dtype(state.name)
                states[state.name] = torch.full(shape, value, dtype=dtype, device="cpu")
        kept = config.lifecycle.columns() if config.lifecycle is not None else []
        dtypes = {name: torch.float64 if name == "score" else torch.int64 for name in kept}
        defaults = {"last_use": clocks["batches"] % 2**32, "timestamp": clocks["timestamp"]}
        columns = {
            name: torch.full((1,), defaults.get(name, 0), dtype=dtype, device="cpu") for name, dtype in dtypes.items()
        }
        return RowSchema(weight, states, columns)

    def _rows_of(self, group: Group, table: int, ids: torch.Tensor) -> Int64Array:
        array = ids_to_host(self.config.name, ids)
        rows = group.engine.tables.find_rows(table, array)[0]
        if (rows < 0).any():
            missing = array[rows < 0]
            raise KeyError(f"table {self.config.name!r}: {len(missing)} ids have no row (such as {missing[0]})")
        return rows
