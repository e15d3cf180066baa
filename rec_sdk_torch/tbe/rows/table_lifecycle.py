"""The lifecycle of ids, as a part of a table view: counts, candidates, clocks and eviction."""

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
"""The clocks that the rules of a table go by, of a new one."""
CLOCKS = tuple(INITIAL_CLOCKS)


class LifecycleView:
    """The ids of one table: what is counted of them, and those that leave.

    Attributes:
        layout: the groups that the table is in.
        config: of the table.
    """

    layout: Layout
    config: TableConfig

    def locate(self) -> tuple[Group, int]:
        """Returns the table's group and its place there, with every row where the engine says it is."""
        group, table = self.layout.find_table(self.config.name)
        group.swap.settle()
        return group, table

    def row_columns(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """The counts of the rows of `ids`, int64 `[n]`, all of which it knows; empty without a `TableLifecycle`.

        By name those that its rules need: `count`, `last_use` (of the clock `batches`, modulo 2^32), `clicks` and
        `timestamp`, int64 `[n]`, and `score`, float64 `[n]`.

        Raises:
            KeyError: an id has no row.
        """
        with self.layout.locks.exclusive():
            group, table = self.locate()
            columns = group.engine.lifecycle.read_columns(table, self._rows_of(group, table, ids))
        return {name: torch.from_numpy(values) for name, values in columns.items()}

    def write_row_columns(self, ids: torch.Tensor, columns: Mapping[str, torch.Tensor]) -> None:
        """Sets what `row_columns` reads; columns that are not given stay.

        Raises:
            KeyError: an id has no row, or the table keeps no such column; nothing was set.
            ValueError: another number of values than of ids, or one out of range.
            TypeError: values of another type.
        """
        given = columns_to_host(self.config.name, columns)
        with self.layout.locks.exclusive():
            group, table = self.locate()
            rows = self._rows_of(group, table, ids)
            group.before_change(table, ids_to_host(self.config.name, ids))
            group.engine.lifecycle.write_columns(table, rows, given)

    def candidates(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Ids that were seen and not admitted, int64 `[n]` ascending, and what is counted of each, int64 `[n]`.

        `count`, `last_use`, and `clicks` and `timestamp` where the table's rules need them.
        """
        with self.layout.locks.exclusive():
            group, table = self.locate()
            ids, columns = group.engine.lifecycle.candidates(table)
        return torch.from_numpy(ids), {name: torch.from_numpy(values) for name, values in columns.items()}

    def set_candidates(self, ids: torch.Tensor, columns: Mapping[str, torch.Tensor]) -> None:
        """The table has these candidates and no others.

        A `last_use` or a `timestamp` that is not given is that of the clocks now; `clicks` are 0.

        Raises:
            KeyError, ValueError: columns that cannot be; ids that are there twice, or are rows; a table that admits
                every id; nothing was set.
            TypeError: ids or values of another type.
        """
        wanted, given = ids_to_host(self.config.name, ids), columns_to_host(self.config.name, columns)
        twice = len(wanted) - len(np.unique(wanted))
        if twice:
            raise ValueError(f"table {self.config.name!r}: {twice} of the candidates are duplicates")
        with self.layout.locks.exclusive():
            group, table = self.locate()
            rows = wanted[group.engine.tables.find_rows(table, wanted)[0] >= 0]
            if len(rows):
                raise ValueError(f"table {self.config.name!r}: {len(rows)} candidates (such as {rows[0]}) are rows")
            group.engine.lifecycle.set_candidates(table, wanted, given)

    def sketch(self) -> torch.Tensor:
        """The state of the table's sketch, for `set_sketch` of another, uint8 `[n]`; n is 0 without one."""
        with self.layout.locks.exclusive():
            group, table = self.locate()
            return torch.from_numpy(group.engine.lifecycle.sketch(table))

    def set_sketch(self, states: Sequence[torch.Tensor]) -> None:
        """The table's sketch counts at least what those did that these are the states of, uint8 `[n]` each.

        They may have had other bytes and another depth. Where they are several, each id was counted in one of them.

        Raises:
            ValueError: what is no state of a sketch; a table without a sketch; nothing was set.
            TypeError: values of another type.
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
        """The clocks of the rules: training `batches`, `steps` (backward passes), and the latest `timestamp`."""
        with self.layout.locks.exclusive():
            group, table = self.locate()
            return dict(zip(CLOCKS, group.engine.lifecycle.clock(table), strict=True))

    def set_clocks(self, clocks: Mapping[str, int]) -> None:
        """Sets what `clocks` reads; what is not given stays.

        Rows and candidates whose timestamps are later than the clock are of that moment when ids are next evicted.

        Raises:
            KeyError: a name that is none of a clock.
            ValueError: no whole number, or one out of range.
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
        """Takes out the ids that the table's rules choose now; how many had rows.

        Rows that batches in flight use, or whose gradients wait for the end of a window, stay for the next time.
        """
        with self.layout.locks.exclusive():
            group, table = self.locate()
            evicted = evict(group, table)
        group.warn_of_evictions()
        return evicted

    def copy_shard_lifecycle(
        self, old: LifecycleView, ids: torch.Tensor, owned: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Copies the counts of rows `ids` and of the `owned` candidates, the clocks, and the whole sketch."""
        self.write_row_columns(ids, old.row_columns(ids))
        self.set_clocks(old.clocks())
        waiting, columns = old.candidates()
        here = owned(waiting)
        self.set_candidates(waiting[here], {name: values[here] for name, values in columns.items()})
        sketch = old.sketch()
        if len(sketch):
            self.set_sketch([sketch])

    # ---- rows that have left

    def take_evicted(self, at_most: int | None = None) -> EvictedRows:
        """Hands out rows that have left the table and were not taken yet, those first that left first; each once.

        The table keeps them where its `TableLifecycle` has `keep_evicted`.

        Args:
            at_most: so many rows; None for all.

        Raises:
            RuntimeError: the table keeps no rows that leave.
            ValueError: `at_most` is no whole number from 0 on.
        """
        number = None if at_most is None else as_int(at_most)
        if at_most is not None and (number is None or number < 0):
            raise ValueError(f"table {self.config.name!r}: at_most is {at_most!r}, must be an int from 0 on, or None")
        buffer = self.layout.evicted.get(self.config.name)
        if buffer is None:
            raise RuntimeError(
                f"table {self.config.name!r} keeps no evicted rows: set keep_evicted=True in its "
                "AdmitAndEvictConfig (TableLifecycle)"
            )
        # An update that an interrupt broke off may need the memory of these rows: it is not completed before.
        with calls, self.layout.locks.launch:
            taken = self.row_schema().concatenate(buffer.first_rows(number))
            buffer.drop_first(len(taken))
        return taken

    def pending_evicted_rows(self, after: int = -1) -> list[EvictedRows]:
        """Returns rows for `take_evicted`, which go on waiting, with what the table keeps of a row now.

        Hold `exclusive()`. `after`: those alone that left after this serial.
        """
        buffer = self.layout.evicted.get(self.config.name)
        if buffer is None or not buffer.chunks:
            return []
        shape = self.row_schema()
        return [shape.fit(rows) for serial, rows in buffer.chunks if serial > after]

    def row_schema(self, clocks: Mapping[str, int] = INITIAL_CLOCKS) -> RowSchema:
        """Returns the parts and columns that the table keeps of a row, as they are in a row that begins at `clocks`."""
        config, optimizer = self.config, self.layout.optimizer_of(self.config.name)
        weight = torch.empty((0, config.embedding_dim), dtype=config.weight_dtype, device="cpu")
        states: dict[str, torch.Tensor] = {}
        if optimizer is not None:
            starts = optimizer.spec.state_init(optimizer.options)
            for state, start in zip(optimizer.spec.states, starts, strict=True):
                shape, dtype = (1, state.elements(config.embedding_dim)), optimizer.state_dtype(state.name)
                states[state.name] = torch.full(shape, start, dtype=dtype, device="cpu")
        kept = config.lifecycle.columns() if config.lifecycle is not None else []
        dtypes = {name: torch.float64 if name == "score" else torch.int64 for name in kept}
        begins = {"last_use": clocks["batches"] % 2**32, "timestamp": clocks["timestamp"]}
        columns = {
            name: torch.full((1,), begins.get(name, 0), dtype=dtype, device="cpu") for name, dtype in dtypes.items()
        }
        return RowSchema(weight, states, columns)

    def _rows_of(self, group: Group, table: int, ids: torch.Tensor) -> Int64Array:
        wanted = ids_to_host(self.config.name, ids)
        rows = group.engine.tables.find_rows(table, wanted)[0]
        if (rows < 0).any():
            missing = wanted[rows < 0]
            raise KeyError(f"table {self.config.name!r}: {len(missing)} ids have no row (such as {missing[0]})")
        return rows
