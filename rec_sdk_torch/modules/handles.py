"""The parameters a collection shows: one handle per table, which stands for rows that live in the engine."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..tbe import TableBatchedEmbedding, TableConfig, TableOptimizer
from ..tbe.batch import Int64Array
from ..tbe.optimizer import class_name, spec_for


class TableParameter(torch.nn.Parameter):
    """A table's handle: shape `[0, D]`, requires grad, never part of the autograd graph.

    TorchRec's and torch's `apply_optimizer_in_backward` leave what they were asked for on it; the next
    training forward checks that and hands it to the engine.
    """

    table: str
    embedding_optimizer_cls: type | None

    @classmethod
    def create(cls, config: TableConfig, device: torch.device, embedding_optimizer_cls: type | None) -> TableParameter:
        """The handle of `config`."""
        data = torch.empty((0, config.embedding_dim), dtype=config.weight_dtype, device=device)
        handle: TableParameter = torch.Tensor._make_subclass(cls, data, True)
        handle.table = config.name
        handle.embedding_optimizer_cls = embedding_optimizer_cls
        return handle

    def __deepcopy__(self, memo: dict[int, Any]) -> TableParameter:
        twin: TableParameter = torch.Tensor._make_subclass(TableParameter, self.data.clone(), self.requires_grad)
        twin.__dict__.update(self.__dict__)
        for name in ("_in_backward_optimizers", "_optimizer_classes", "_optimizer_kwargs"):
            if name in twin.__dict__:
                twin.__dict__[name] = list(twin.__dict__[name])
        memo[id(self)] = twin
        return twin

    def requires_grad_(self, requires_grad: bool = True) -> TableParameter:
        """Raises RuntimeError for False: rows are updated by the backward of a lookup, whatever the handle says."""
        self.requires_grad = requires_grad
        return self

    @property
    def requires_grad(self) -> bool:
        """True always; see `requires_grad_`."""
        return True

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if not value:
            raise RuntimeError(
                f"table {self.table!r} cannot be frozen by requires_grad: call eval() on its collection, or look it "
                "up under torch.no_grad()"
            )

    def requested(self) -> list[tuple[type, dict[str, Any]]]:
        """Optimizer classes and keywords that were applied to the table, in order."""
        classes = getattr(self, "_optimizer_classes", [])
        return list(zip(classes, getattr(self, "_optimizer_kwargs", []), strict=True))


def check_parity(handle: TableParameter, optimizer_class: type) -> None:
    """Checks an optimizer class against the one the table was made for.

    Raises:
        TypeError: the fused update does not know the class, or it is not of the family of the table's
            `embedding_optimizer_cls`.
    """
    spec = spec_for(optimizer_class)
    made_for = handle.embedding_optimizer_cls
    if made_for is not None and spec_for(made_for).family != spec.family:
        raise TypeError(
            f"table {handle.table!r} was made with embedding_optimizer_cls={class_name(made_for)}, but "
            f"apply_optimizer_in_backward gives it {class_name(optimizer_class)}: change one of the two"
        )


def check_same(handle: TableParameter, optimizer_class: type, kwargs: Mapping[str, Any]) -> None:
    """Raises RuntimeError if the table has another optimizer, or the same with other keywords."""
    for given, options in handle.requested():
        if given is not optimizer_class or options != dict(kwargs):
            raise RuntimeError(
                f"table {handle.table!r} already has {class_name(given)} with {options}; "
                f"{class_name(optimizer_class)} with {dict(kwargs)} cannot be applied on top"
            )


def ids_problem(config: TableConfig, ids: torch.Tensor) -> str | None:
    """What keeps `ids` from being the rows of a hash table; None when nothing does."""
    if ids.dtype != torch.int64 or ids.dim() != 1:
        return f"its ids are {ids.dtype} of shape {tuple(ids.shape)}, expected flat torch.int64"
    twice = ids.numel() - ids.unique().numel()
    if twice:
        return f"{twice} of its ids are there twice"
    if 0 < config.capacity < ids.numel():
        return f"{ids.numel()} ids, table {config.name!r} has a capacity of {config.capacity}"
    return None


class TableHandle(torch.nn.Module):
    """Holds a table's handle under the name TorchRec users know, `<collection>.embeddings.<table>.weight`.

    In a state dict an index table is `weight` `[num_embeddings, D]`; a hash table is `ids` int64 `[n]` and
    their `weight` `[n, D]`.
    """

    def __init__(
        self, embedding: TableBatchedEmbedding, config: TableConfig, embedding_optimizer_cls: type | None
    ) -> None:
        super().__init__()
        # In a list, so that the embedding is not registered as a submodule of every one of its tables.
        self._owner = [embedding]
        self._config = config
        self.weight = TableParameter.create(config, embedding.device, embedding_optimizer_cls)

    def twin(self, embedding: TableBatchedEmbedding, memo: dict[int, Any]) -> TableHandle:
        """This handle for a copy of the embedding."""
        twin = TableHandle(embedding, self._config, None)
        twin.weight = copy.deepcopy(self.weight, memo)
        return twin

    def _apply(self, fn: Any, recurse: bool = True) -> TableHandle:
        """`.to(device)` and `.to_empty(device=...)` move the handle, which keeps its type and dtype."""
        data = fn(self.weight.data).to(self.weight.dtype)
        if torch._has_compatible_shallow_copy_type(self.weight, data):
            self.weight.data = data
        else:  # from the meta device
            moved: TableParameter = torch.Tensor._make_subclass(TableParameter, data, True)
            moved.__dict__.update(self.weight.__dict__)
            self.weight = moved
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        ids, weight = self.rows()
        if self._config.hashed:
            destination[prefix + "ids"] = ids
        destination[prefix + "weight"] = weight

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids int64 `[n]`, weight `[n, D]`) of the whole table, copied to the host; on the meta device, shapes."""
        config = self._config
        if self._owner[0].device.type == "meta":
            shape = (0 if config.hashed else config.num_embeddings, config.embedding_dim)
            weight = torch.empty(shape, dtype=config.weight_dtype, device="meta")
            return torch.empty(shape[0], dtype=torch.int64, device="meta"), weight
        group, table = self._owner[0].find_table(self._config.name)
        count = group.engine.row_count(table)
        ids = torch.empty(count, dtype=torch.int64)
        weight = torch.empty((count, self._config.embedding_dim), dtype=self._config.weight_dtype)
        done = 0
        for chunk, records in group.read_table(table):
            ids[done : done + len(chunk)] = torch.from_numpy(chunk)
            weight[done : done + len(chunk)] = group.layout.weight(records)
            done += len(chunk)
        return ids, weight

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        wanted = [prefix + "ids", prefix + "weight"] if self._config.hashed else [prefix + "weight"]
        missing = [key for key in wanted if key not in state_dict]
        if missing:
            missing_keys.extend(missing)
            return
        ids = state_dict[prefix + "ids"] if self._config.hashed else None
        problem = self._shape_problem(ids, state_dict[prefix + "weight"])
        if problem:
            error_msgs.append(f"{prefix}weight: {problem}")
            return
        self.load_rows(ids, state_dict[prefix + "weight"])
        if strict:
            unexpected_keys.extend(k for k in state_dict if k.startswith(prefix) and k not in wanted)

    def _shape_problem(self, ids: torch.Tensor | None, weight: torch.Tensor) -> str | None:
        if ids is not None:
            problem = ids_problem(self._config, ids)
            if problem:
                return problem
        rows = self._config.num_embeddings if ids is None else ids.numel()
        expected = (rows, self._config.embedding_dim)
        if tuple(weight.shape) != expected:
            return f"shape {tuple(weight.shape)}, expected {expected}"
        return None

    def load_rows(self, ids: torch.Tensor | None, weight: torch.Tensor) -> None:
        """Replaces the table: its rows become `ids` (None: every row of an index table) with `weight`.

        Rows that stay keep their optimizer states. Gradients of an open accumulation window are dropped.
        """
        self._owner[0].drop_windows()
        group, table = self._owner[0].find_table(self._config.name)
        if ids is None:
            ids = torch.arange(self._config.num_embeddings)
        wanted = ids.cpu().contiguous().numpy()
        kept: list[tuple[Int64Array, torch.Tensor]] = []
        known = group.engine.table_rows(table)[0]
        if self._config.hashed and not np.array_equal(np.sort(known), np.sort(wanted)):
            for chunk, records in group.read_table(table) if group.layout.state_elements else ():
                stays = np.isin(chunk, wanted)
                kept.append((chunk[stays], records[torch.from_numpy(stays)]))
            group.engine.clear_table(table)
        group.write_weights(table, wanted, weight.detach().cpu())
        for chunk, records in kept:
            for state in range(len(group.layout.state_elements)):
                group.write_state(table, state, chunk, group.layout.state(records, state))


def module_dict(handles: Mapping[str, TableHandle]) -> torch.nn.ModuleDict:
    """The handles by table name; set past ModuleDict's own check, which refuses names such as `items`."""
    modules = torch.nn.ModuleDict()
    modules._modules.update(handles)
    return modules


def table_optimizers(handles: Mapping[str, TableParameter]) -> dict[str, TableOptimizer]:
    """The optimizer of each table that has one, one object for all tables of one call.

    Raises:
        TypeError, ValueError, RuntimeError: see `check_parity`, `check_same` and `TableOptimizer.create`.
    """
    made: list[tuple[type, dict[str, Any], TableOptimizer]] = []
    result: dict[str, TableOptimizer] = {}
    for name, handle in handles.items():
        requested = handle.requested()
        if not requested:
            continue
        cls, kwargs = requested[0]
        check_parity(handle, cls)
        for later, options in requested[1:]:
            check_same(handle, later, options)
        for other, options, optimizer in made:
            if other is cls and options is kwargs:
                result[name] = optimizer
                break
        else:
            result[name] = TableOptimizer.create(cls, kwargs, f"table {name!r}, {cls.__name__}")
            made.append((cls, kwargs, result[name]))
    return result
