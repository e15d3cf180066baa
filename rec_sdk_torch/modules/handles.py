"""The parameters a collection shows: one handle per table, which stands for rows that live in the engine."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..tbe import TableBatchedEmbedding, TableConfig
from ..tbe.state import save_table
from . import requests


class TableParameter(torch.nn.Parameter):
    """A table's handle: shape `[0, D]`, requires grad, never part of the autograd graph.

    TorchRec's and torch's `apply_optimizer_in_backward` leave what they were asked for on it, which is checked there;
    the next training forward hands it to the engine.
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

    def twin(self, data: torch.Tensor) -> TableParameter:
        """A handle on `data` with the same requests. The optimizer objects that torch made stay with the first."""
        twin: TableParameter = torch.Tensor._make_subclass(TableParameter, data, True)
        notes = {name: self.__dict__[name] for name in requests.NOTES if name in self.__dict__}
        twin.__dict__.update({name: value for name, value in self.__dict__.items() if name not in notes})
        for name, values in notes.items():
            dropped = name == requests.OPTIMIZERS and requests.is_hooked(self)
            twin.__dict__[name] = [] if dropped else list(values)
        if notes:
            twin._optimizer_kwargs = notes[requests.KEYWORDS]
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> TableParameter:
        twin = self.twin(self.data.clone())
        memo[id(self)] = twin
        return twin

    @property
    def _optimizer_kwargs(self) -> requests.Keywords:
        """What torch's apply adds to is checked; the attribute is there when an optimizer was noted."""
        try:
            keywords: requests.Keywords = self.__dict__[requests.KEYWORDS]
        except KeyError:
            raise AttributeError(f"table {self.table!r} was given no optimizer") from None
        return keywords

    @_optimizer_kwargs.setter
    def _optimizer_kwargs(self, values: Iterable[dict[str, Any]]) -> None:
        self.__dict__[requests.KEYWORDS] = requests.Keywords(self, values)

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
        notes = self.__dict__
        return list(zip(notes.get(requests.CLASSES, []), notes.get(requests.KEYWORDS, []), strict=True))


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
            self.weight = self.weight.twin(data)
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
