"""Table handles: for each table of a collection, a parameter without rows that represents the rows in the engine."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch._guards import TracingContext
from torch.utils.hooks import RemovableHandle

from ..runtime.eager import check_real, eager
from ..runtime.rank_rows import mark_rank_rows
from ..tbe import TableBatchedEmbedding, TableConfig, save_table
from . import optimizer_assignments


def _modifies_argument(function: Callable[..., Any]) -> bool:
    """Returns whether a torch function changes its first argument."""
    name = getattr(function, "__name__", "")
    if name == "__set__":
        return _attribute_name(function) == "data"
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _attribute_name(function: Any) -> str | None:
    """Returns the name of the tensor attribute that `function` gets or sets; None for other functions."""
    return getattr(getattr(function, "__self__", None), "__name__", None)


class _ReadOnlyTensor(torch.Tensor):
    """A tensor without rows that represents a table. Writing to it raises an error, because no row would change.

    The results of `detach()` and `data` share the tensor's memory, so they are of this class too.
    """

    table: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _modifies_argument(func):
            _raise_if_table(func, args[0] if args else next(iter(kwargs.values())))
        if "out" in kwargs:
            _raise_if_table(func, kwargs["out"])
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            detached = getattr(func, "__name__", "") == "detach" or (
                getattr(func, "__name__", "") == "__get__" and _attribute_name(func) == "data"
            )
            if detached and isinstance(args[0], _ReadOnlyTensor):
                table, result = args[0].table, torch.Tensor._make_subclass(_ReadOnlyTensor, result)
                result.table = table
            return result


def _raise_if_table(function: Any, target: Any) -> None:
    """Raises RuntimeError if `target`, a tensor or a list of tensors, represents a table."""
    for tensor in target if isinstance(target, (list, tuple)) else [target]:
        if isinstance(tensor, _ReadOnlyTensor):
            name = "data" if function.__name__ == "__set__" else function.__name__
            raise RuntimeError(
                f"table {tensor.table!r}: {name} on its parameter would change no row, since the parameter has none. "
                "A table's config says its initial weights (initializer_type, init_fn), load_state_dict sets its rows; "
                "an average of parameters (AveragedModel) and an optimizer that writes to parameters (LBFGS) are for "
                "the dense modules only"
            )


_GRAD: Any = torch.Tensor.grad


@eager
def _pending_gradient(embedding: TableBatchedEmbedding, table: str) -> torch.Tensor | None:
    return embedding.gradient(table)


class Ranks(Protocol):
    """Interface of the exchanges between the ranks that share a table.

    Attributes:
        rows: process group for tensors on the table's device.
        rank, world_size: this rank and the number of ranks.
    """

    rank: int
    world_size: int

    @property
    def rows(self) -> Any: ...

    def gather_numbers(self, numbers: Sequence[float], what: str) -> list[list[float]]: ...


class TableParameter(_ReadOnlyTensor, torch.nn.Parameter):
    """A table's handle: a parameter of shape `[0, D]`. `backward(inputs=...)` may list it; it gets no gradient there.

    `apply_optimizer_in_backward` of TorchRec or torch stores optimizer assignments on the handle, which checks them.
    The next training forward passes them to the engine.
    """

    embedding_optimizer_cls: type | None
    sharded = False
    """Whether other ranks own other rows of the table."""
    ranks: Ranks | None = None
    """Exchanges with the ranks that own the table's other rows; None if no other rank owns rows of the table."""
    differs_by_rank = False
    """Whether other ranks train the same dense parameters, but this table differs between ranks."""

    @classmethod
    def create(cls, config: TableConfig, device: torch.device, embedding_optimizer_cls: type | None) -> TableParameter:
        """Returns a new handle for a table."""
        with torch.inference_mode(False):  # an inference tensor cannot be a leaf of the autograd graph
            data = torch.empty((0, config.embedding_dim), dtype=config.weight_dtype, device=device)
            check_real(data)
            handle: TableParameter = torch.Tensor._make_subclass(cls, data, True)
        handle.table = config.name
        handle.embedding_optimizer_cls = embedding_optimizer_cls
        return handle

    def with_data(self, data: torch.Tensor) -> TableParameter:
        """Returns a handle like this one for `data`, without the optimizer objects that torch created.

        It keeps the optimizer assignments.
        """
        with torch.inference_mode(False):
            twin: TableParameter = torch.Tensor._make_subclass(TableParameter, torch.empty_like(data), True)
        attributes = {name: self.__dict__[name] for name in optimizer_assignments.ATTRIBUTES if name in self.__dict__}
        twin.__dict__.update({name: value for name, value in self.__dict__.items() if name not in attributes})
        for name, values in attributes.items():
            dropped = name == optimizer_assignments.OPTIMIZERS and optimizer_assignments.is_hooked(self)
            twin.__dict__[name] = [] if dropped else list(values)
        if attributes:
            twin._optimizer_kwargs = attributes[optimizer_assignments.KEYWORDS]
        return twin

    def _embedding_with_step(self) -> TableBatchedEmbedding | None:
        """Returns the table-batched embedding if it keeps pending gradients for `step()`, else None."""
        embedding = self._embedding_of()
        return embedding if embedding is not None and embedding.options.updates_at_step else None

    @property
    def updates_at_step(self) -> bool:
        """Whether gradients are kept until `step()` of the optimizer."""
        return self._embedding_with_step() is not None

    @property
    def grad(self) -> torch.Tensor | None:
        """The pending gradient, float32 `[n, D]`, with `update="step"`; None if there is none.

        See `TableBatchedEmbedding.gradient`. Setting it to None excludes the table from the next update. While
        torch.compile traces, it is always None: tracing replaces the handle with a fake tensor, whose gradient would
        need the handle's shape `[0, D]`.
        """
        embedding = None if TracingContext.try_get() is not None else self._embedding_with_step()
        return super().grad if embedding is None else _pending_gradient(embedding, self.table)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        embedding = self._embedding_with_step()
        if embedding is None:
            try:
                _GRAD.__set__(self, value)
            except (TypeError, RuntimeError) as error:
                raise type(error)(
                    f"table {self.table!r}: grad can hold rows only with update='step': {error}"
                ) from None
        else:
            embedding.set_gradient(self.table, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> TableParameter:
        with torch._C.DisableTorchFunctionSubclass():
            twin = self.with_data(self.data.clone())
        memo[id(self)] = twin
        return twin

    @property
    def _optimizer_kwargs(self) -> optimizer_assignments.CheckedKeywords:
        """The list to which torch's `apply` appends keywords, checking each; absent before the first assignment."""
        try:
            keywords: optimizer_assignments.CheckedKeywords = self.__dict__[optimizer_assignments.KEYWORDS]
        except KeyError:
            raise AttributeError(f"table {self.table!r} was given no optimizer") from None
        return keywords

    @_optimizer_kwargs.setter
    def _optimizer_kwargs(self, values: Iterable[dict[str, Any]]) -> None:
        self.__dict__[optimizer_assignments.KEYWORDS] = optimizer_assignments.CheckedKeywords(self, values)

    def requires_grad_(self, requires_grad: bool = True) -> TableParameter:
        """Freezes the table or, with True, thaws it; see `TableBatchedEmbedding.freeze`."""
        self.requires_grad = requires_grad
        return self

    def bind(self, embedding: TableBatchedEmbedding) -> None:
        """Binds this handle to a table of `embedding`, with a weak reference."""
        self._embedding = weakref.ref(embedding)
        embedding.set_parameter(self.table, self)

    def register_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Ignores `hook`, because no gradient reaches a table's parameter through the autograd graph."""
        return RemovableHandle(OrderedDict())

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
        """Registers `hook`, which is called with this handle after backward passes that leave a pending gradient."""

        def call_with_gradient(handle: torch.Tensor) -> None:
            if handle.grad is not None:
                hook(handle)

        embedding = self._embedding_of()
        if embedding is not None:
            embedding.execute_parameter(self.table)
        result: RemovableHandle = super().register_post_accumulate_grad_hook(call_with_gradient)
        return result

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_embedding"}

    def _embedding_of(self) -> TableBatchedEmbedding | None:
        embedding = self.__dict__.get("_embedding")
        return None if embedding is None else embedding()

    @property
    def requires_grad(self) -> bool:
        """Whether the table is trained, that is, not frozen."""
        embedding = self._embedding_of()
        return embedding is None or self.table not in embedding.options.frozen

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        embedding = self._embedding_of()
        if embedding is None:
            raise RuntimeError(f"table {self.table!r}: this parameter is no longer the handle of a table")
        if value is not self.requires_grad:
            (embedding.thaw if value else embedding.freeze)(self.table)

    def mark_rank_rows(self, tensors: Iterable[torch.Tensor]) -> None:
        """Marks `tensors` of a state dict as rows of this rank only; does nothing if other ranks have no other rows."""
        if self.ranks is not None and self.ranks.world_size > 1:
            mark_rank_rows(tensors, self.ranks.rank, self.ranks.world_size)
        elif self.differs_by_rank:
            mark_rank_rows(tensors, torch.distributed.get_rank(), torch.distributed.get_world_size())

    def assignments(self) -> list[tuple[type, dict[str, Any]]]:
        """Returns the optimizer classes and keywords that were applied to the table, in order."""
        return optimizer_assignments.assignments_of(self)


class _HandleParameters(dict[str, Any]):
    """The parameter dict of a TableHandle. Its only entry is the handle, which cannot be replaced by other tensors."""

    def __init__(self, owner: TableHandle, handle: TableParameter) -> None:
        super().__init__(weight=handle)
        self._owner = weakref.ref(owner)
        handle.bind(owner.embedding)
        self._table = handle.table

    def __setitem__(self, name: str, value: Any) -> None:
        handle, owner = self.get(name), self._owner()
        if value is handle:
            return
        check_real(value)
        leaves_meta = handle is not None and handle.is_meta and isinstance(value, torch.Tensor) and not value.is_meta
        if leaves_meta and owner is not None:  # DistributedModelParallel moves modules so
            for module in (owner.embedding, owner):
                module.to_empty(device=value.device)
            return
        raise RuntimeError(
            f"table {self._table!r}: its parameter cannot be replaced by a {type(value).__name__}, "
            "which would change no row. Leave tables out of what torch.func.functional_call is given; "
            "load_state_dict sets rows"
        )

    def __delitem__(self, name: str) -> None:
        raise RuntimeError(
            f"table {self._table!r}: its parameter cannot be removed or parametrized (weight_norm, spectral_norm, "
            "register_parametrization), which would change no row"
        )

    def replace(self, handle: TableParameter) -> None:
        """Replaces the handle with another handle of the same table."""
        owner = self._owner()
        assert owner is not None
        handle.bind(owner.embedding)
        super().__setitem__("weight", handle)


class TableHandle(torch.nn.Module):
    """Module that holds a table's parameter under TorchRec's name, `<collection>.embeddings.<table>.weight`.

    A state dict contains `weight`, `[num_embeddings, D]`, for an index table; for a hash table it contains `ids`, int64
    `[n]`, and `weight`, `[n, D]`.
    """

    embedding: TableBatchedEmbedding
    weight: TableParameter
    ids: torch.Tensor
    sharded = False
    """Whether other ranks own other rows of the table."""

    def __init__(
        self, embedding: TableBatchedEmbedding, config: TableConfig, embedding_optimizer_cls: type | None
    ) -> None:
        super().__init__()
        # Not registered as a submodule; otherwise the embedding would be a submodule of every table's handle.
        self.__dict__["embedding"] = embedding
        self._config = config
        handle = TableParameter.create(config, embedding.device, embedding_optimizer_cls)
        self._parameters: _HandleParameters = _HandleParameters(self, handle)
        if config.hashed:
            # torch.distributed.checkpoint looks up the keys of a state dict as attributes.
            self.register_buffer("ids", torch.empty(0, dtype=torch.int64, device=embedding.device))

    @property
    def table(self) -> str:
        """The table's name."""
        return self._config.name

    def extra_repr(self) -> str:
        """Returns a description of the table: rows (of this rank), columns, data type, cache and optimizer."""
        return self.embedding.describe(self.table, self.weight.assignments())

    def known_ids(self) -> torch.Tensor:
        """Returns a hash table's ids in order of their first lookup, or an index table's row numbers; int64 `[n]`."""
        return self.embedding.view(self.table).ids()

    def state_names(self) -> list[str]:
        """Returns the keys of the table's tensors in a state dict, without prefix."""
        return ["ids", "weight"] if self._config.hashed else ["weight"]

    def copy_for(self, embedding: TableBatchedEmbedding, memo: dict[int, Any]) -> TableHandle:
        """Returns a copy of this handle for a copy of the embedding."""
        twin = TableHandle(embedding, self._config, None)
        twin.replace_weight(copy.deepcopy(self.weight, memo))
        return twin

    def replace_weight(self, weight: TableParameter) -> None:
        """Replaces the parameter with another parameter of the same table."""
        self._parameters.replace(weight)

    def _apply(self, fn: Any, recurse: bool = True) -> TableHandle:
        """Moves the handle, for `.to(device)` and `.to_empty(device=...)`; keeps its class and dtype."""
        if self._config.hashed:
            self.ids = fn(self.ids).to(torch.int64)
        with torch._C.DisableTorchFunctionSubclass():
            data = fn(self.weight.data).to(self.weight.dtype)
            if torch._has_compatible_shallow_copy_type(self.weight, data):
                self.weight.data = data
            else:  # the handle leaves the meta device
                self.replace_weight(self.weight.with_data(data))
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        save_table(self.embedding.layout, self._config.name, destination, prefix)
        self.weight.mark_rank_rows(destination[f"{prefix}{name}"] for name in self.state_names())

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
        """Does nothing: the collection loads its tables itself, all of them or, on failure, none."""


class _Handles(torch.nn.ModuleDict):
    """The handles of a collection, which loads their state dicts itself and reports problems."""

    def _get_name(self) -> str:
        return "ModuleDict"

    def _load_from_state_dict(self, *args: Any) -> None:
        """Does nothing, because the collection already reports every problem."""


def module_dict(handles: Mapping[str, TableHandle]) -> torch.nn.ModuleDict:
    """Returns a ModuleDict of the handles, without ModuleDict's check, which rejects table names such as `items`."""
    modules = _Handles()
    modules._modules.update(handles)
    return modules
