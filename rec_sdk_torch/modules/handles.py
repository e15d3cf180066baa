"""The parameters a collection shows: one handle per table, which stands for rows that live in the engine."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from ..tbe import TableBatchedEmbedding, TableConfig, TableOptimizer
from ..tbe.optimizer import class_name, spec_for
from ..tbe.state import save_table


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


class TableHandle(torch.nn.Module):
    """Holds a table's handle under the name TorchRec users know, `<collection>.embeddings.<table>.weight`.

    In a state dict an index table is `weight` `[num_embeddings, D]`; a hash table is `ids` int64 `[n]` and
    their `weight` `[n, D]`.
    """

    ids: torch.Tensor

    def __init__(
        self, embedding: TableBatchedEmbedding, config: TableConfig, embedding_optimizer_cls: type | None
    ) -> None:
        super().__init__()
        # In a list, so that the embedding is not registered as a submodule of every one of its tables.
        self._owner = [embedding]
        self._config = config
        self.weight = TableParameter.create(config, embedding.device, embedding_optimizer_cls)
        if config.hashed:
            # Stands for the key of the state dict: torch.distributed.checkpoint looks keys up as attributes.
            self.register_buffer("ids", torch.empty(0, dtype=torch.int64, device=embedding.device))

    @property
    def table(self) -> str:
        """The table's name."""
        return self._config.name

    def state_names(self) -> list[str]:
        """What the table is called in a state dict, behind its prefix."""
        return ["ids", "weight"] if self._config.hashed else ["weight"]

    def twin(self, embedding: TableBatchedEmbedding, memo: dict[int, Any]) -> TableHandle:
        """This handle for a copy of the embedding."""
        twin = TableHandle(embedding, self._config, None)
        twin.weight = copy.deepcopy(self.weight, memo)
        return twin

    def _apply(self, fn: Any, recurse: bool = True) -> TableHandle:
        """`.to(device)` and `.to_empty(device=...)` move the handle, which keeps its type and dtype."""
        if self._config.hashed:
            self.ids = fn(self.ids).to(torch.int64)
        data = fn(self.weight.data).to(self.weight.dtype)
        if torch._has_compatible_shallow_copy_type(self.weight, data):
            self.weight.data = data
        else:  # from the meta device
            moved: TableParameter = torch.Tensor._make_subclass(TableParameter, data, True)
            moved.__dict__.update(self.weight.__dict__)
            self.weight = moved
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        save_table(self._owner[0], self._config.name, destination, prefix)

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
        """Loads nothing: the collection has loaded all of its tables by now, or none."""


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
