"""The optimizer of a collection's tables as TorchRec's `KeyedOptimizer`: updates happen in the backward pass."""

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
"""TorchRec's name of a table's first state, whatever the optimizer calls it; the others have the optimizer's."""


_ALREADY_LOADED: Any = object()
"""The value of a state that was loaded together with others."""


class _TableState(abc.ABC):
    """A table's optimizer state as one value of a state dict; reads and writes the engine when asked."""

    def __init__(self, embedding: TableBatchedEmbedding, table: str) -> None:
        self._embedding = embedding
        self._table = table

    def __deepcopy__(self, memo: dict[int, Any]) -> _TableState:
        return self

    @abc.abstractmethod
    def problem(self, value: Any, rows: int) -> str | None:
        """Says what keeps `value` from being loaded as the state of `rows` rows; None when nothing does."""

    def _raise_problem(self, value: Any, rows: int = 0) -> None:
        """A CombinedOptimizer loads states one by one, past the check of all of them."""
        problem = self.problem(value, rows)
        if problem:
            raise ValueError(f"a state of table {self._table!r}: {problem}")


class StepState(_TableState):
    """Updates applied so far (`<table>.step`), a scalar."""

    def __init__(self, embedding: TableBatchedEmbedding, table: str, optimizer: TableOptimizer) -> None:
        super().__init__(embedding, table)
        self.optimizer = optimizer

    def state_dict(self) -> torch.Tensor:
        with self._embedding.exclusive():  # a step that an interrupt broke off counts
            return torch.tensor(float(self.optimizer.step), dtype=torch.float64, device="cpu")

    def problem(self, value: Any, rows: int) -> str | None:
        return step_problem(value)

    def load_state_dict(self, value: Any) -> None:
        if value is _ALREADY_LOADED:
            return
        self._raise_problem(value)
        load(self._embedding.layout, [], [self.number(value)])

    def number(self, value: Any) -> tuple[TableOptimizer, int]:
        """The optimizer and its step that loading `value` sets."""
        return self.optimizer, int(float(value))


class IdsState(_TableState):
    """Ids of a hash table (`<table>.ids`), int64 `[n]`: which row each row of the other states belongs to."""

    loading: torch.Tensor | None = None
    """The ids of the load that is under way."""

    def __init__(self, embedding: TableBatchedEmbedding, config: TableConfig) -> None:
        super().__init__(embedding, config.name)
        self._config = config

    def state_dict(self) -> torch.Tensor:
        return self._embedding.view(self._table).ids().sort().values

    def problem(self, value: torch.Tensor, rows: int) -> str | None:
        return hash_ids_problem(self._config, value) or self._unknown(value)

    def _unknown(self, ids: torch.Tensor) -> str | None:
        known = self._embedding.view(self._table).knows(ids)
        if bool(known.all()):
            return None
        example = int(ids.cpu()[~known][0])
        return f"the table does not know {int((~known).sum())} of its ids, such as {example}: load the weights first"

    def load_state_dict(self, value: torch.Tensor) -> None:
        if value is _ALREADY_LOADED:
            return
        self._raise_problem(value)
        self.loading = value.cpu().contiguous()


class RowState(_TableState):
    """One state block of every row of a table, `[n, D]` in its data type, or `[n]` when row-wise.

    Loading replaces the state of the whole table: rows that are not among the loaded ids get its initial value.
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
        """The state chunk by chunk, in row order."""
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
        self._raise_problem(value, len(ids))
        load(self._embedding.layout, [self.content(ids, value)])
        if self._ids is not None and self._index + 1 == len(self._optimizer.spec.states):
            self._ids.loading = None

    def content(self, ids: torch.Tensor, value: torch.Tensor) -> TableWrite:
        """The state of `ids` that loading `value` sets, and that of the table's other rows, as at first."""
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
        states[f"{table}.ids"] = ids  # first, so that the others find what it loads
    for index, state in enumerate(spec.states):
        states[f"{table}.{state.name if index else _FIRST_STATE}"] = RowState(embedding, config, optimizer, index, ids)
    states[f"{table}.step"] = StepState(embedding, table, optimizer)
    return states


def _updated_group(group: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in group.items() if name != "params"}
    for name, value in given.items():
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
    """Optimizer of the tables of one collection.

    `step()` and `zero_grad()` do nothing, but with `update="step"`. `param_groups[i]` holds the live options of one
    `apply_optimizer_in_backward` call, read at every update. `state[handle]` maps `<table>.momentum1`,
    `<table>.exp_avg_sq`, `<table>.step` (and `<table>.ids` of a hash table with states) to views of the
    engine, which `state_dict()` reads.
    """

    def __init__(
        self,
        embedding: TableBatchedEmbedding,
        params: dict[str, TableParameter],
        optimizers: Mapping[str, TableOptimizer],
    ) -> None:
        """Makes the optimizer of the tables in `optimizers`.

        Args:
            embedding: holds the rows.
            params: the handle of each table by its parameter name.
            optimizers: by table name.
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
        self._opt_called = True  # a scheduler warns of its first step before the optimizer's: backward passes are those
        wrap_gradient_clipping(EmbCacheFusedOptimizer)

    @property
    def updates_at_step(self) -> bool:
        """Whether `step()` updates rows."""
        return self._embedding.options.updates_at_step

    @eager
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """With `update="step"` updates the rows with the gradients that wait, and uses them up; else does nothing.

        Args:
            closure: is called first, with gradients enabled; it runs forward and backward.

        Returns:
            The value of `closure`, if rows are updated here.

        Raises:
            ValueError, TypeError: an option that no update may use; nothing was changed.
        """
        if not self.updates_at_step:
            return None
        wrap_clipping()  # another library may have replaced torch's clipping since
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._embedding.apply_gradients()
        return loss

    def zero_grad(self, set_to_none: bool = False) -> None:
        """With `update="step"` forgets the gradients that wait, whatever `set_to_none` says; else does nothing."""
        if self.updates_at_step:
            self._embedding.drop_gradients()

    def set_optimizer_step(self, step: int) -> None:
        """Sets how many updates every table has had; the next one is number `step` + 1.

        Raises:
            ValueError: no int of at least 0.
        """
        self._embedding.set_optimizer_step(step)

    def update_hyper_parameters(self, params_dict: Mapping[str, Any]) -> None:
        """Sets options of every table's optimizer, of their names in `param_groups`, or `beta1` and `beta2`.

        Raises:
            NotImplementedError: an option that one of the optimizers does not have; nothing was set.
        """
        updated = [_updated_group(group, params_dict) for group in self.param_groups]
        for group, options in zip(self.param_groups, updated, strict=True):
            group.update(options)

    @eager
    def state_dict(self) -> dict[str, Any]:
        """Returns the state dict as TorchRec has it: one moment of all tables, copied to the host, in order of ids."""
        with self._embedding.exclusive():
            result: dict[str, Any] = super().state_dict()
        for name, handle in self.params.items():
            if isinstance(handle, TableParameter):
                rows = [key for key, state in self.state[handle].items() if not isinstance(state, StepState)]
                handle.mark_rank_rows(result["state"][name][key] for key in rows)
        return result

    @eager
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads strictly, as TorchRec's does; `<table>.momentum2` is read as `<table>.exp_avg_sq`.

        `<table>.ids` may be missing: rows are then those of the ids from 0 on. So may `<table>.step`, where the formula
        does not use it.

        Raises:
            ValueError, TypeError: tables, states, shapes or options that do not match, or that no update may use:
                nothing was loaded.
        """
        renamed = {
            param: {key.replace(".momentum2", ".exp_avg_sq"): value for key, value in values.items()}
            for param, values in state_dict["state"].items()
        }
        for name, handle in self.params.items():
            if isinstance(handle, TableParameter):
                if name in renamed:
                    renamed[name] = self._with_defaults(handle, renamed[name])
                self._check(name, handle, renamed)
        if self.defaults["_save_param_groups"]:
            self._check_groups(state_dict["param_groups"])
        self._load_states(renamed)
        ours = {name for name, handle in self.params.items() if isinstance(handle, TableParameter)}
        loaded = {name: dict.fromkeys(v, _ALREADY_LOADED) if name in ours else v for name, v in renamed.items()}
        super().load_state_dict({**state_dict, "state": loaded})

    def _load_states(self, given: Mapping[str, Mapping[str, Any]]) -> None:
        """Loads all states of all tables, or none."""
        contents: list[TableWrite] = []
        numbers: list[tuple[TableOptimizer, int]] = []
        for name, handle in self.params.items():
            if not isinstance(handle, TableParameter):
                continue
            for key, state in self.state[handle].items():
                value = given[name][key]
                if isinstance(state, RowState):
                    ids = given[name].get(f"{handle.table}.ids", row_numbers(value))
                    contents.append(state.content(ids.cpu(), value))
                elif isinstance(state, StepState):
                    numbers.append(state.number(value))
        load(self._embedding.layout, contents, numbers)

    def _with_defaults(self, handle: TableParameter, given: Mapping[str, Any]) -> dict[str, Any]:
        """A table's values of a state dict, with those that TorchRec's leave out, and without rows that do not fit.

        Rows without ids have those from 0 on. A step that no update uses stays as it is.
        """
        table, states, values = handle.table, self.state[handle], dict(given)
        of_rows = [key for key, state in states.items() if isinstance(state, RowState) and key in values]
        step = states[f"{table}.step"]
        if f"{table}.step" not in values and not step.optimizer.uses_step():
            values[f"{table}.step"] = step.state_dict()
        if of_rows and f"{table}.ids" in states:
            values.setdefault(f"{table}.ids", row_numbers(values[of_rows[0]]))
        rows = self._rows[table]
        if rows is not None and of_rows:
            counts = {len(row_numbers(values[key])) for key in of_rows}
            if len(counts) == 1 and counts != {rows}:
                warn_of_rows(table, counts.pop(), rows)
                values.update({key: values[key][:rows] for key in of_rows})
        return values

    def _check_groups(self, given: Sequence[Mapping[str, Any]]) -> None:
        """Whether options can become those of the groups, which are found by the names of their parameters."""
        names = {handle: name for name, handle in self.params.items()}
        of_params = {tuple(sorted(group["params"])): group for group in given}
        for optimizer, group in zip(self._optimizers, self.param_groups, strict=False):
            new = of_params.get(tuple(sorted(names[handle] for handle in group["params"])))
            if new is None or new.keys() != group.keys():
                expected = sorted(group.keys() - {"params"})
                raise ValueError(f"the options of {optimizer.where} are missing, or are not {expected}")
            optimizer.check_options({name: new[name] for name in new if name != "params"})

    def _check(self, name: str, handle: TableParameter, given: Mapping[str, Mapping[str, Any]]) -> None:
        if name not in given:
            raise ValueError(f"the state of {name} is missing")
        states, values = self.state[handle], given[name]
        missing, unexpected = sorted(states.keys() - values.keys()), sorted(values.keys() - states.keys())
        if missing or unexpected:
            raise ValueError(f"states of {name}: missing are {missing}, unexpected {unexpected}")
        ids = values.get(f"{handle.table}.ids")
        for key, state in states.items():
            rows = ids.numel() if isinstance(ids, torch.Tensor) else len(row_numbers(values[key]))
            problem = state.problem(values[key], rows)
            if problem:
                raise ValueError(f"state {key}: {problem}")
