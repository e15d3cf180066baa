"""Table passes: some optimizers read or change all rows of their tables between two updates."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from ..cache.batch import Int64Array
from ..cache.device_cache import Group
from ..config.optimizer import TableOptimizer
from ..rows.row_parts import WEIGHT, all_ids, insert_owned_ids, read_parts, write_parts

Rows = tuple[TableOptimizer, Group, int, Int64Array]
"""A chunk of a table's rows: the optimizer, the group, the table's index in the group, and the ids."""


class TablePasses:
    """The table passes of one update. After an interrupt, the next call of `run` resumes them; no row changes twice."""

    def __init__(
        self, optimizers: Sequence[TableOptimizer], groups: Sequence[Group], frozen: Collection[str] = ()
    ) -> None:
        """Prepares the passes; no row is read yet.

        Args:
            optimizers: the optimizers whose table pass is due.
            groups: the groups with all their tables.
            frozen: names of tables whose rows must not change.
        """
        self._optimizers = optimizers
        self._groups = groups
        self._frozen = frozen
        self._rows: list[Rows] | None = None
        self._progress: tuple[int, dict[str, torch.Tensor] | None] = (0, None)
        """The number of finished chunks, and the next chunk's new values or None: one assignment changes both."""
        self._maxima: dict[int, float] = {}

    def run(self) -> None:
        """Makes the passes that are not done yet. The rows must be updated before; the caller must hold both locks."""
        if not self._optimizers:
            return
        if self._rows is None:
            self._rows = self._all_rows()
        while self._progress[0] < len(self._rows):
            optimizer, group, table, ids = self._rows[self._progress[0]]
            table_pass = optimizer.spec.table_pass
            assert table_pass is not None
            names = [WEIGHT, *(state.name for state in optimizer.spec.states)]
            places = {part: names.index(part) - 1 for part in table_pass.parts}
            parts = self._progress[1]
            if parts is None:
                read = read_parts(group, table, ids, places)
                parts = {name: part if name == WEIGHT else part.float() for name, part in read.items()}
                greatest = table_pass.rows(optimizer.options, optimizer.step + 1, parts)
                if greatest is not None:
                    self._maxima[id(optimizer)] = max(greatest, self._maxima.get(id(optimizer), 0.0))
                self._progress = (self._progress[0], parts)
            if table_pass.option is None:
                group.before_change(table, ids)
                write_parts(group, table, ids, {places[name]: values for name, values in parts.items()})
            self._progress = (self._progress[0] + 1, None)
        for optimizer in self._optimizers:
            if optimizer.spec.table_pass is not None and optimizer.spec.table_pass.option is not None:
                optimizer.options[optimizer.spec.table_pass.option] = 1.0 + self._maxima.get(id(optimizer), 0.0)

    def _all_rows(self) -> list[Rows]:
        due = {id(optimizer) for optimizer in self._optimizers}
        rows: list[Rows] = []
        for group in self._groups:
            group.swap.settle()
            for table, member in enumerate(group.members):
                changes = member.config.name not in self._frozen
                if changes and member.optimizer is not None and id(member.optimizer) in due:
                    table_pass = member.optimizer.spec.table_pass
                    # Without `option`, the pass also changes rows that no batch has used.
                    if table_pass is not None and table_pass.option is None:
                        insert_owned_ids(group, table)
                    row_ids = all_ids(group, table)
                    chunks = (row_ids[begin : begin + group.chunk] for begin in range(0, len(row_ids), group.chunk))
                    rows += [(member.optimizer, group, table, ids) for ids in chunks]
        return rows
