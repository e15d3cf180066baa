"""The fused optimizer: presents the optimizers of a collection's tables as one `KeyedOptimizer` of TorchRec."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torchrec.optim.fused import FusedOptimizer

from ..runtime.eager import eager
from ..tbe import (
    TableBatchedEmbedding,
    TableConfig,
    TableOptimizer,
    TableWrite,
    hash_ids_problem,
    load,
    row_numbers,
    step_problem,
    tensor_problem,
    warn_of_rows,
)
from .clipping import wrap_clipping
from .handles import TableParameter
from .optimizer_assignments import defaults_of
from .torchrec_hooks import wrap_gradient_clipping

_FIRST_STATE = "momentum1"
"""TorchRec's name of a table's first state; the other states keep the names that the optimizer uses."""


_ALREADY_LOADED: Any = object()
"""Marker in place of the value of a state that was already loaded together with the other states."""


class _TableState(abc.ABC):
    """A value of the optimizer's state dict; saving reads it from the engine, and loading writes it there."""

    def __init__(self, embedding: TableBatchedEmbedding, table: str) -> None:
        self._embedding = embedding
        self._table = table

    def __deepcopy__(self, memo: dict[int, Any]) -> _TableState:
        return self

    @abc.abstractmethod
    def problem(self, value: Any, rows: int) -> str | None:
        """Returns why `value` cannot be loaded as the state of `rows` rows; None if it can be loaded."""

    def _check_value(self, value: Any, rows: int = 0) -> None:
        """Raises an error if `value` cannot be loaded.

        A CombinedOptimizer needs this check, as it loads states one by one and does not check all states first.
        """
        problem = self.problem(value, rows)
        if problem:
            raise ValueError(f"a state of table {self._table!r}: {problem}")


class StepState(_TableState):
    """Number of updates applied (`<table>.step`), a scalar."""

    def __init__(self, embedding: TableBatchedEmbedding, table: str, optimizer: TableOptimizer) -> None:
        super().__init__(embedding, table)
        self.optimizer = optimizer

    def state_dict(self) -> torch.Tensor:
        with self._embedding.exclusive():  # an interrupted update is completed first
            return torch.tensor(float(self.optimizer.step), dtype=torch.float64, device="cpu")

    def problem(self, value: Any, rows: int) -> str | None:
        return step_problem(value)

    def load_state_dict(self, value: Any) -> None:
        if value is _ALREADY_LOADED:
            return
        self._check_value(value)
        load(self._embedding.layout, [], [self.with_step_count(value)])

    def with_step_count(self, value: Any) -> tuple[TableOptimizer, int]:
        """Returns the optimizer and the step count that loading `value` sets."""
        return self.optimizer, int(float(value))


class IdsState(_TableState):
    """Ids of a hash table (`<table>.ids`), int64 `[n]`: row i of every other state belongs to the i-th of these ids."""

    loading: torch.Tensor | None = None
    """The ids of a load in progress."""

    def __init__(self, embedding: TableBatchedEmbedding, config: TableConfig) -> None:
        super().__init__(embedding, config.name)
        self._config = config

    def state_dict(self) -> torch.Tensor:
        return self._embedding.view(self._table).ids().sort().values

    def problem(self, value: torch.Tensor, rows: int) -> str | None:
        return hash_ids_problem(self._config, value) or self._unknown_ids_problem(value)

    def _unknown_ids_problem(self, ids: torch.Tensor) -> str | None:
        known = self._embedding.view(self._table).knows(ids)
        if bool(known.all()):
            return None
        example = int(ids.cpu()[~known][0])
        return f"the table does not know {int((~known).sum())} of its ids, such as {example}: load the weights first"

    def load_state_dict(self, value: torch.Tensor) -> None:
        if value is _ALREADY_LOADED:
            return
        self._check_value(value)
        self.loading = value.cpu().contiguous()


class RowState(_TableState):
    """An optimizer state of all rows of a table, `[n, D]` in its data type, or `[n]` if row-wise.

    Loading replaces the state of the whole table: rows whose ids are not loaded get the initial value.
    """

    def __init__(
        self,
        embedding: TableBatchedEmbedding,
        config: TableConfig,
        optimizer: TableOptimizer,
        index: int,
        ids: IdsState | None,
    ) -> None:
        super().__init__(embedding, config.name)
        self._optimizer = optimizer
        self._index = index
        self._name = optimizer.spec.states[index].name
        self._ids = ids
        self._shape = () if optimizer.spec.states[index].rowwise else (config.embedding_dim,)

    def chunks(self) -> Iterator[torch.Tensor]:
        """Yields the state chunk by chunk, in row order."""
        for chunk in self._embedding.view(self._table).chunks([self._name]):
            yield chunk.parts[self._name].reshape(-1, *self._shape)

    def state_dict(self) -> torch.Tensor:
        with self._embedding.exclusive():
            view = self._embedding.view(self._table)
            return view.read(view.ids().sort().values, [self._name]).parts[self._name].reshape(-1, *self._shape)

    def problem(self, value: torch.Tensor, rows: int) -> str | None:
        expected, problem = (rows, *self._shape), tensor_problem(value)
        if problem is not None or tuple(value.shape) == expected:
            return problem
        return f"shape {tuple(value.shape)}, expected {expected}"

    def load_state_dict(self, value: torch.Tensor) -> None:
        if value is _ALREADY_LOADED:
            return
        ids = None if self._ids is None else self._ids.loading
        ids = row_numbers(value) if ids is None else ids
        self._check_value(value, len(ids))
        load(self._embedding.layout, [self.content(ids, value)])
        if self._ids is not None and self._index + 1 == len(self._optimizer.spec.states):
            self._ids.loading = None

    def content(self, ids: torch.Tensor, value: torch.Tensor) -> TableWrite:
        """Returns the writes for loading `value`: the state of `ids`, and the initial value for all other rows."""
        view = self._embedding.view(self._table)
        initial = self._optimizer.spec.state_init(self._optimizer.options)[self._index]
        shape = (len(ids), *view.parts()[self._name])
        return TableWrite(view, ids, {self._name: value.reshape(shape)}, initial={self._name: initial})


def _table_states(
    embedding: TableBatchedEmbedding, config: TableConfig, optimizer: TableOptimizer
) -> dict[str, _TableState]:
    table, spec = config.name, optimizer.spec
    states: dict[str, _TableState] = {}
    ids = IdsState(embedding, config) if config.hashed and spec.states else None
    if ids is not None:
        states[f"{table}.ids"] = ids  # loaded first, because the other states need the ids
    for index, state in enumerate(spec.states):
        states[f"{table}.{state.name if index else _FIRST_STATE}"] = RowState(embedding, config, optimizer, index, ids)
    states[f"{table}.step"] = StepState(embedding, table, optimizer)
    return states


def _updated_group(group: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a param_group with `changes` applied; `beta1` and `beta2` change `betas`."""
    options = {name: value for name, value in group.items() if name != "params"}
    for name, value in changes.items():
        if name in ("beta1", "beta2") and "betas" in options:
            beta1, beta2 = options["betas"]
            options["betas"] = (value, beta2) if name == "beta1" else (beta1, value)
        elif name in options:
            options[name] = value
        else:
            raise NotImplementedError(
                f"option {name!r} is not one of the tables' optimizer, which has {sorted(options)}"
            )
    return options


class EmbCacheFusedOptimizer(FusedOptimizer):
    """The optimizer of the tables of one collection.

    `step()` and `zero_grad()` do nothing, except with `update="step"`. `param_groups[i]` contains the options of one
    `apply_optimizer_in_backward` call; every update reads them, so changes take effect at once. `state[handle]` maps
    names such as `<table>.momentum1`, `<table>.step`, and for a hash table `<table>.ids`, to objects that read the
    values from the engine when `state_dict()` is called.
    """

    def __init__(
        self,
        embedding: TableBatchedEmbedding,
        params: dict[str, TableParameter],
        optimizers: Mapping[str, TableOptimizer],
    ) -> None:
        """Creates the optimizer of the tables in `optimizers`.

        Args:
            embedding: the table-batched embedding that holds the rows.
            params: handle of each table, by parameter name.
            optimizers: optimizer of each table, by table name.
        """
        self._embedding = embedding
        configs = {table.name: table for table in embedding.tables}
        self._rows = {name: None if config.hashed else config.num_embeddings for name, config in configs.items()}
        state: dict[Any, Any] = {}
        distinct: dict[int, TableOptimizer] = {}
        for handle in params.values():
            optimizer = optimizers[handle.table]
            state[handle] = _table_states(embedding, configs[handle.table], optimizer)
            if id(optimizer) not in distinct:
                distinct[id(optimizer)] = optimizer
                optimizer.options["params"] = []
            optimizer.options["params"].append(handle)
        self._optimizers = list(distinct.values())
        super().__init__(dict(params), state, [optimizer.options for optimizer in self._optimizers])
        self.defaults.update(defaults_of(self._optimizers))
        # Schedulers warn if they step before the optimizer; here the backward pass takes the place of step().
        self._opt_called = True
        wrap_gradient_clipping(EmbCacheFusedOptimizer)

    @property
    def updates_at_step(self) -> bool:
        """Whether `step()` updates rows."""
        return self._embedding.options.updates_at_step

    @eager
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the rows with the pending gradients and clears them; does nothing without `update="step"`.

        Args:
            closure: called first, with gradients enabled; it runs forward and backward.

        Returns:
            The value of `closure`; None without `update="step"`, where `closure` is not called.

        Raises:
            ValueError, TypeError: an option is invalid; no row was changed.
        """
        if not self.updates_at_step:
            return None
        wrap_clipping()  # a library may have replaced torch's clipping functions
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._embedding.apply_gradients()
        return loss

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Discards the pending gradients, whatever `set_to_none` is; does nothing without `update="step"`."""
        if self.updates_at_step:
            self._embedding.drop_gradients()

    def set_optimizer_step(self, step: int) -> None:
        """Sets the number of updates of every table; the next update has the number `step` + 1.

        Raises:
            ValueError: `step` is not an int of at least 0.
        """
        self._embedding.set_optimizer_step(step)

    def update_hyper_parameters(self, params_dict: Mapping[str, Any]) -> None:
        """Sets options of every table's optimizer, by name as in `param_groups`; also accepts `beta1` and `beta2`.

        Raises:
            NotImplementedError: an optimizer does not have one of the options; nothing was set.
        """
        updated = [_updated_group(group, params_dict) for group in self.param_groups]
        for group, options in zip(self.param_groups, updated, strict=True):
            group.update(options)

    @eager
    def state_dict(self) -> dict[str, Any]:
        """Returns the state dict in TorchRec's format, in host memory, with rows sorted by id.

        All values are from the same point in time.
        """
        with self._embedding.exclusive():
            result: dict[str, Any] = super().state_dict()
        for name, handle in self.params.items():
            if isinstance(handle, TableParameter):
                rows = [key for key, state in self.state[handle].items() if not isinstance(state, StepState)]
                handle.mark_rank_rows(result["state"][name][key] for key in rows)
        return result

    @eager
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state dict, whose keys must match; `<table>.momentum2` is accepted for `<table>.exp_avg_sq`.

        Without `<table>.ids`, row i belongs to id i. `<table>.step` may be missing if the formula does not use it.

        Raises:
            ValueError, TypeError: tables, states, shapes or options do not match or are invalid; nothing was loaded.
        """
        renamed = {
            param: {key.replace(".momentum2", ".exp_avg_sq"): value for key, value in values.items()}
            for param, values in state_dict["state"].items()
        }
        for name, handle in self.params.items():
            if isinstance(handle, TableParameter):
                if name in renamed:
                    renamed[name] = self._with_defaults(handle, renamed[name])
                self._check_states(name, handle, renamed)
        if self.defaults["_save_param_groups"]:
            self._check_groups(state_dict["param_groups"])
        self._load_states(renamed)
        tables = {name for name, handle in self.params.items() if isinstance(handle, TableParameter)}
        loaded = {name: dict.fromkeys(v, _ALREADY_LOADED) if name in tables else v for name, v in renamed.items()}
        super().load_state_dict({**state_dict, "state": loaded})

    def _load_states(self, states_by_param: Mapping[str, Mapping[str, Any]]) -> None:
        """Loads the states of all tables; if that fails, loads none."""
        contents: list[TableWrite] = []
        numbers: list[tuple[TableOptimizer, int]] = []
        for name, handle in self.params.items():
            if not isinstance(handle, TableParameter):
                continue
            for key, state in self.state[handle].items():
                value = states_by_param[name][key]
                if isinstance(state, RowState):
                    ids = states_by_param[name].get(f"{handle.table}.ids", row_numbers(value))
                    contents.append(state.content(ids.cpu(), value))
                elif isinstance(state, StepState):
                    numbers.append(state.with_step_count(value))
        load(self._embedding.layout, contents, numbers)

    def _with_defaults(self, handle: TableParameter, loaded: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a table's states from a state dict, adding missing states and dropping rows beyond the table's end.

        Missing ids are 0, 1, ... A missing step count is replaced with the current one if no update uses it.
        """
        table, states, values = handle.table, self.state[handle], dict(loaded)
        row_keys = [key for key, state in states.items() if isinstance(state, RowState) and key in values]
        step = states[f"{table}.step"]
        if f"{table}.step" not in values and not step.optimizer.uses_step():
            values[f"{table}.step"] = step.state_dict()
        if row_keys and f"{table}.ids" in states:
            values.setdefault(f"{table}.ids", row_numbers(values[row_keys[0]]))
        rows = self._rows[table]
        if rows is not None and row_keys:
            counts = {len(row_numbers(values[key])) for key in row_keys}
            if len(counts) == 1 and counts != {rows}:
                warn_of_rows(table, counts.pop(), rows)
                values.update({key: values[key][:rows] for key in row_keys})
        return values

    def _check_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Checks that each param_group has a loaded group with the same parameters and options, and valid values."""
        names = {handle: name for name, handle in self.params.items()}
        of_params = {tuple(sorted(group["params"])): group for group in groups}
        for optimizer, group in zip(self._optimizers, self.param_groups, strict=False):
            new = of_params.get(tuple(sorted(names[handle] for handle in group["params"])))
            if new is None or new.keys() != group.keys():
                expected = sorted(group.keys() - {"params"})
                raise ValueError(f"the options of {optimizer.where} are missing, or are not {expected}")
            optimizer.check_options({name: new[name] for name in new if name != "params"})

    def _check_states(
        self, name: str, handle: TableParameter, states_by_param: Mapping[str, Mapping[str, Any]]
    ) -> None:
        if name not in states_by_param:
            raise ValueError(f"the state of {name} is missing")
        states, values = self.state[handle], states_by_param[name]
        missing, unexpected = sorted(states.keys() - values.keys()), sorted(values.keys() - states.keys())
        if missing or unexpected:
            raise ValueError(f"states of {name}: missing are {missing}, unexpected {unexpected}")
        ids = values.get(f"{handle.table}.ids")
        for key, state in states.items():
            rows = ids.numel() if isinstance(ids, torch.Tensor) else len(row_numbers(values[key]))
            problem = state.problem(values[key], rows)
            if problem:
                raise ValueError(f"state {key}: {problem}")
