"""Reference for a table-batched embedding, written in plain torch with float64.

Optimizers are torch's own or, where torch has none, the documented formulas. They update the rows of a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from coin_reference import Coin
from lifecycle_reference import MOST, IdCounts, LifecycleReference
from optimizer_table import BY_NAME
from oracle_scenarios import Scenario
from reference_optimizers import EnsembleRowWiseAdagrad

from rec_sdk_torch.tbe import EvictReason, Pooling, TableConfig


@dataclass
class EvictedRow:
    """A row evicted from its table, with its values at the time of eviction."""

    id: int
    weight: torch.Tensor
    states: dict[str, torch.Tensor]
    counted: IdCounts
    reason: EvictReason


class Reference:
    """Tables as dense float64 matrices with a row for every id of the scenario."""

    def __init__(self, scenario: Scenario, ids: list[np.ndarray], initial: list[torch.Tensor]) -> None:
        tables = self.tables = scenario.tables
        self.max_norm, self.last_norm = scenario.max_norm, 0.0  # computed over the gradients of all tables in an update
        self.frozen = scenario.frozen
        self.row_of = [{int(i): row for row, i in enumerate(every)} for every in ids]
        self.weights = [torch.nn.Parameter(weight.double().clone()) for weight in initial]
        row = BY_NAME[scenario.optimizer]
        self.optimizers = [row.on_rows(weight) for weight in self.weights]
        self.start = float(row.options.get("initial_accumulator_value", 0.0))  # initial value of a state
        self.window, self.backwards = scenario.window, 0
        self.last_gradients: dict[str, torch.Tensor] = {}  # norm of the last update's gradients, before clipping
        # ids with rows, by batch and table; set in the batch's forward
        self._rows_of: dict[tuple[int, int], set[int]] = {}
        self.max_gradient = scenario.max_gradient
        self.initial = [weight.detach().clone() for weight in self.weights]
        # ids of earlier training batches, except removed ids
        self.seen: list[set[int]] = [set() for _ in tables]
        self._pending: list[set[int]] = [set() for _ in tables]  # rows with gradients in the accumulation buffer
        self.evicted: list[list[EvictedRow]] = [[] for _ in tables]  # evicted rows, for tables that keep them
        self.lifecycles = [
            table.lifecycle and LifecycleReference(table.lifecycle, coin=Coin(scenario.seed, table.name))
            for table in tables
        ]

    def features_of(self, table: int) -> range:
        begin = sum(t.num_features for t in self.tables[:table])
        return range(begin, begin + self.tables[table].num_features)

    def ids_of(self, table: int, features: list[list[np.ndarray]]) -> np.ndarray:
        return np.concatenate([bag for f in self.features_of(table) for bag in features[f]])

    def unpadded(self, table: int, features: list[list[np.ndarray]]) -> np.ndarray:
        """Returns a mask that is True for the table's lookups of ids other than the padding id."""
        ids, padding = self.ids_of(table, features), self.tables[table].padding_idx
        return np.full(len(ids), True) if padding is None else ids != padding

    def begin_batch(
        self, features: list[list[np.ndarray]], clicks: list[list[np.ndarray]], timestamps: list[list[np.ndarray]]
    ) -> None:
        """Counts the ids of a training batch, and records which of them have rows; only these rows are trained."""
        for index, lifecycle in enumerate(self.lifecycles):
            if self.tables[index].name == self.frozen:
                continue
            unpadded = self.unpadded(index, features)
            known = set(self.ids_of(index, features)[unpadded].tolist())
            self.seen[index] |= known
            self._rows_of[id(features), index] = known
            if lifecycle is not None:
                lifecycle.batch(*(self.ids_of(index, of)[unpadded] for of in (features, clicks, timestamps)))
                self._rows_of[id(features), index] = known & lifecycle.rows.keys()

    @torch.no_grad()
    def _end_step(self, features: list[list[np.ndarray]], in_flight: list[list[list[np.ndarray]]]) -> None:
        """Evicts ids after a step, and resets their rows to the initial values."""
        for index, lifecycle in enumerate(self.lifecycles):
            if self.tables[index].name == self.frozen:
                continue
            self._pending[index] |= self._rows_of[id(features), index]
            if not self.backwards % self.window:
                self._pending[index] = set()
            if lifecycle is None:
                continue
            lifecycle.waiting = self._pending[index]
            before = dict(lifecycle.rows)
            for i in lifecycle.end_step(self._held(index, in_flight)):
                self._evict(index, i, before[i], lifecycle.reasons[i])

    def _held(self, table: int, in_flight: list[list[list[np.ndarray]]]) -> set[int]:
        return set().union(*(self._rows_of.get((id(batch), table), set()) for batch in in_flight))

    def _evict(self, table: int, i: int, counted: IdCounts, reason: EvictReason) -> None:
        row, weight = self.row_of[table][i], self.weights[table]
        lifecycle = self.tables[table].lifecycle
        if lifecycle is not None and lifecycle.keep_evicted:
            names = self.optimizers[table].states
            states = {name: self.state(table, name)[row].clone() for name in names}
            self.evicted[table].append(EvictedRow(i, weight[row].detach().clone(), states, replace(counted), reason))
        self._forget(table, row)

    def fill_counts(self, table: int, ids: set[int]) -> None:
        """Sets the counters of rows to one below their maximum; clicks only if the table counts clicks."""
        lifecycle = self.lifecycles[table]
        if lifecycle is None or self.tables[table].name == self.frozen:
            return
        for one in (lifecycle.rows[i] for i in ids & lifecycle.rows.keys()):
            one.count, one.clicks = MOST - 1, MOST - 1 if lifecycle.rules.needs_clicks else one.clicks

    @torch.no_grad()
    def remove(self, table: int, ids: list[int], in_flight: list[list[list[np.ndarray]]]) -> int | None:
        """Removes ids; returns how many of them the table had.

        Returns None, and removes nothing, if a batch in flight or pending gradients use one of the ids.
        """
        lifecycle, hashed = self.lifecycles[table], self.tables[table].hashed
        known = [i for i in ids if not hashed or i in (self.seen[table] if lifecycle is None else lifecycle.rows)]
        if (self._held(table, in_flight) | self._pending[table]) & set(known):
            return None
        for i in known:
            self._evict(table, i, IdCounts() if lifecycle is None else lifecycle.rows.pop(i), EvictReason.REMOVED)
        self.seen[table] -= set(known)
        if lifecycle is not None:
            lifecycle.candidates = {i: one for i, one in lifecycle.candidates.items() if i not in ids}
        return len(known)

    @torch.no_grad()
    def put_back(self, table: int, rows: list[EvictedRow], overwrite: bool) -> int:
        """Puts evicted rows back, the latest of each id; returns the number of rows put back."""
        lifecycle = self.lifecycles[table]
        assert lifecycle is not None
        latest = {row.id: row for row in rows}
        chosen = [row for i, row in latest.items() if overwrite or i not in lifecycle.rows]
        for evicted in chosen:
            place, weight = self.row_of[table][evicted.id], self.weights[table]
            weight[place] = evicted.weight
            for name, state in evicted.states.items():
                self.optimizers[table].state[weight][name][place] = state
            lifecycle.rows[evicted.id] = replace(evicted.counted)
            lifecycle.candidates.pop(evicted.id, None)
            self.seen[table].add(evicted.id)
        return len(chosen)

    def _forget(self, table: int, row: int) -> None:
        weight = self.weights[table]
        weight[row] = self.initial[table][row]
        for name in self.optimizers[table].states:
            self.optimizers[table].state[weight][name][row] = self.start if name == "sum" else 0.0

    def forward(self, features: list[list[np.ndarray]], weights: list[list[torch.Tensor]] | None) -> list[torch.Tensor]:
        """Returns for each feature its rows `[n, D]` (sequences), or its pooled bags `[B, D]`."""
        pairs = zip(self.tables, self.weights, strict=True)
        tables = [weight.detach() if table.name == self.frozen else weight for table, weight in pairs]
        return self._features(tables, features, weights)

    @torch.no_grad()
    def tolerances(
        self, features: list[list[np.ndarray]], weights: list[list[torch.Tensor]] | None
    ) -> list[torch.Tensor]:
        """Returns the allowed error of each output if every weight w may be wrong by 1 + |w|; a bag sums its
        rows' errors.
        """
        absolute = None if weights is None else [[bag.abs() for bag in bags] for bags in weights]
        return self._features([1 + weight.abs() for weight in self.weights], features, absolute)

    def _features(
        self,
        tables: list[torch.Tensor],
        features: list[list[np.ndarray]],
        weights: list[list[torch.Tensor]] | None,
    ) -> list[torch.Tensor]:
        outputs, feature = [], 0
        for table, place, weight, lifecycle in zip(self.tables, self.row_of, tables, self.lifecycles, strict=True):
            for _ in range(table.num_features):
                given = weights[feature] if weights is not None else None
                outputs.append(self._feature(table, place, weight, features[feature], given, lifecycle))
                feature += 1
        return outputs

    @staticmethod
    def _feature(
        table: TableConfig,
        place: Mapping[int, int],
        weight: torch.Tensor,
        bags: list[np.ndarray],
        scale: list[torch.Tensor] | None,
        lifecycle: LifecycleReference | None,
    ) -> torch.Tensor:
        unpadded = [[int(i) for i in bag if i != table.padding_idx] for bag in bags]
        lengths = torch.tensor([len(bag) for bag in unpadded], dtype=torch.int64)
        ids = [int(i) for bag in bags for i in bag]
        admitted = lifecycle.rows if lifecycle is not None and lifecycle.rules.admits else place
        known = [n for n, i in enumerate(ids) if i != table.padding_idx and i in admitted]
        found = F.embedding(torch.tensor([place[ids[n]] for n in known], dtype=torch.int64), weight, sparse=True)
        rows = found.new_full(
            (len(ids), table.embedding_dim), 0.0 if lifecycle is None else lifecycle.rules.default_value
        )
        rows = rows.index_copy(0, torch.tensor(known, dtype=torch.int64), found)
        padding = [n for n, i in enumerate(ids) if i == table.padding_idx]
        rows = rows.index_fill(0, torch.tensor(padding, dtype=torch.int64), 0.0)
        if table.pooling is Pooling.NONE:
            return rows
        if scale is not None:
            rows = rows * torch.cat(scale).double()[:, None]
        bag_of_row = torch.repeat_interleave(torch.arange(len(bags)), torch.tensor([len(bag) for bag in bags]))
        pooled = rows.new_zeros((len(bags), table.embedding_dim)).index_add(0, bag_of_row, rows)
        if table.pooling is Pooling.MEAN:
            pooled = pooled / lengths.clamp(min=1)[:, None]
        return pooled

    def after_backward(
        self, lr: float, features: list[list[np.ndarray]], in_flight: list[list[list[np.ndarray]]]
    ) -> None:
        """Runs the update if this ends a window, then evictions.

        `in_flight`: batches without their backward pass yet.
        """
        self.backwards += 1
        if not self.backwards % self.window:
            self._update(lr)
        self._end_step(features, in_flight)

    def _update(self, lr: float) -> None:
        for table, weight in zip(self.tables, self.weights, strict=True):
            if table.name != self.frozen:
                assert weight.grad is not None
                weight.grad = weight.grad.coalesce()
                self.last_gradients[table.name] = weight.grad.values().clone()
        squares = [gradient.square().sum() for gradient in self.last_gradients.values()]
        self.last_norm = float(torch.stack(squares).sum().sqrt())
        factor = min(1.0, self.max_norm / (self.last_norm + 1e-6))
        for table, optimizer, weight in zip(self.tables, self.optimizers, self.weights, strict=True):
            if table.name == self.frozen:
                continue
            optimizer.param_groups[0]["lr"] = lr
            assert weight.grad is not None
            weight.grad.values().mul_(factor).clamp_(-self.max_gradient, self.max_gradient)
            optimizer.step()
            weight.grad = None
        for index, optimizer in enumerate(self.optimizers):
            if isinstance(optimizer, EnsembleRowWiseAdagrad) and self.tables[index].name != self.frozen:
                optimizer.between(torch.tensor(self._rows(index), dtype=torch.int64))

    def _rows(self, table: int) -> list[int]:
        """Returns the row indexes of the table's ids."""
        place, lifecycle = self.row_of[table], self.lifecycles[table]
        if not self.tables[table].hashed:
            return list(place.values())
        return [place[i] for i in (self.seen[table] if lifecycle is None else lifecycle.rows)]

    def state(self, table: int, name: str) -> torch.Tensor:
        """Returns a state of every row, `[n, D]` or `[n, 1]`."""
        state: torch.Tensor = self.optimizers[table].state[self.weights[table]][name]
        return state
