"""Tables as inputs of a backward pass: `backward(inputs=...)` trains the tables whose parameters it lists."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

will_execute = torch._C._will_engine_execute_node
"""Returns whether the running backward pass executes a node; raises RuntimeError outside of a backward pass."""
graph_task = torch._C._current_graph_task_id
"""Returns the number of the running backward pass; -1 outside of a backward pass, and under compiled autograd."""

LISTED = "rec_sdk_torch.tables_in_inputs"
"""The key of the listed tables in torch's thread-local storage, which torch copies to the threads of devices."""
is_set: Callable[[str], bool] = torch._C._is_key_in_tls
"""Returns whether torch's thread-local storage has a key; `LISTED` is set in passes with `inputs=`."""
_get: Callable[[str], Any] = torch._C._get_obj_in_tls
_set: Callable[[str, object], None] = torch._C._stash_obj_in_tls
_remove: Callable[[str], None] = getattr(torch._C, "_remove_obj_from_tls", lambda key: _set(key, None))

_table_of: WeakValueDictionary[int, _Table] = WeakValueDictionary()
"""The table of each registered parameter, by the parameter's `id`."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Table:
    """A table as an input of backward passes. The parameter is held, so that no other object gets its `id`."""

    name: str
    edges: weakref.ref[ParameterEdges]
    parameter: torch.Tensor


class _Engine(torch._C._ImperativeEngine):
    """Torch's autograd engine, except that a pass that lists table parameters runs the lookups of their embeddings.

    An edge from each lookup to each parameter would have the same effect, but in every backward pass torch would
    execute the nodes of all parameters, which takes 2 us per table. All passes with `inputs=` call the engine.
    """

    inner: torch._C._ImperativeEngine

    def run_backward(
        self,
        tensors: Any,
        grads: Any,
        keep_graph: bool,
        create_graph: bool,
        inputs: Any = (),
        *args: Any,
        **options: Any,
    ) -> Any:
        """Runs a backward pass; the arguments are torch's."""
        if not inputs and not is_set(LISTED):
            return self.inner.run_backward(tensors, grads, keep_graph, create_graph, (), *args, **options)
        listed = _listed_tables(inputs)
        leaves = [edges.leaf for edges in listed if edges.leaf is not None]
        _set(LISTED, listed)
        try:
            inputs = (*inputs, *leaves)
            results: Any = self.inner.run_backward(tensors, grads, keep_graph, create_graph, inputs, *args, **options)
        finally:
            _remove(LISTED)  # torch itself restores the value of an outer pass, after the node that runs this one
        return results[: len(inputs) - len(leaves)] if leaves and results is not None else results


def _install_engine() -> None:
    if not isinstance(Variable._execution_engine, _Engine):
        engine = _Engine()
        engine.inner = Variable._execution_engine
        Variable._execution_engine = engine


def _listed_tables(inputs: Sequence[Any]) -> dict[ParameterEdges, list[str]]:
    """Returns the tables whose parameters are among `inputs`, which are tensors and gradient edges."""
    listed: dict[ParameterEdges, list[str]] = {}
    for each in inputs:
        parameter = each if isinstance(each, torch.Tensor) else getattr(each.node, "variable", None)
        table = _table_of.get(id(parameter))
        edges = None if table is None else table.edges()
        if table is not None and edges is not None:
            listed.setdefault(edges, []).append(table.name)
    return listed


class ParameterEdges:
    """The table parameters as inputs of an embedding's lookups. No gradient flows to them.

    Attributes:
        leaf: an input of every lookup; None before the first lookup. A backward pass that lists a parameter in
            `inputs=` also lists the leaf.
        node: the leaf's node. A pass without `inputs=` executes it too.
    """

    def __init__(self) -> None:
        self._tables: dict[str, _Table] = {}
        self._executed: set[str] = set()
        self.leaf: torch.Tensor | None = None
        self.node: Any = None

    def add(self, table: str, parameter: torch.Tensor) -> None:
        """Registers a leaf without elements as the parameter of a table."""
        _install_engine()
        self._tables[table] = _table_of[id(parameter)] = _Table(table, weakref.ref(self), parameter)

    def execute(self, table: str) -> None:
        """Makes backward passes execute the node of a table's parameter, for its hooks; see `anchor`."""
        self._executed.add(table)

    def anchor(self, device: torch.device) -> torch.Tensor:
        """Returns the tensor that is an input of every lookup: the leaf, joined with parameters that have hooks."""
        _install_engine()  # again, if another library has replaced the engine since
        with torch.inference_mode(False), torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
            if self.leaf is None or self.leaf.device != device:
                self.leaf = torch.empty(0, dtype=torch.float32, device=device, requires_grad=True)
                self.node = get_gradient_edge(self.leaf).node
            executed = [self._tables[table].parameter.flatten() for table in sorted(self._executed)]
            return torch.cat([self.leaf, *executed]) if executed else self.leaf

    def tables_in_inputs(self) -> frozenset[str] | None:
        """Returns the tables whose parameters are in `inputs=` of the running backward pass; None without `inputs`.

        Raises:
            RuntimeError: `torch.autograd.grad` was called with a table's parameter among its inputs.
        """
        if graph_task() == -1:
            return None
        tables: list[str] = (_get(LISTED) or {}).get(self, []) if is_set(LISTED) else []
        try:
            executed = will_execute(self.node)
        except RuntimeError:  # torch raises this for inputs of autograd.grad
            raise RuntimeError(
                f"torch.autograd.grad cannot return the gradient of table {tables[0]!r}, whose parameter has no rows; "
                "nothing was trained. Leave tables out of its inputs, or call backward(), which trains them "
                "(update='backward') or makes their gradients .grad of the parameters (update='step')"
            ) from None
        return None if executed and not tables else frozenset(tables)
