"""Edges of the autograd graph from lookups to table parameters, by which `backward(inputs=...)` selects tables."""

from __future__ import annotations

from typing import Any

import torch

will_execute = torch._C._will_engine_execute_node
"""Returns whether the running backward pass executes a node; raises RuntimeError outside of a backward pass."""
graph_task = torch._C._current_graph_task_id
"""Returns the number of the running backward pass; -1 outside of a backward pass, and under compiled autograd."""


def _node_of(leaf: torch.Tensor) -> Any:
    """Returns the AccumulateGrad node of a leaf tensor."""
    with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
        view: Any = leaf.view_as(leaf)
        return view.grad_fn.next_functions[0][0]


class ParameterEdges:
    """Edges of the autograd graph that make the table parameters inputs of an embedding's lookups.

    No gradient flows along these edges. They make torch run the backward pass of a lookup if `backward(inputs=...)`
    lists a parameter.

    Attributes:
        private: the node of a leaf that users cannot list in `inputs=`, so that only a backward pass without `inputs`
            executes the node.
    """

    def __init__(self) -> None:
        self._parameters: dict[str, torch.Tensor] = {}
        self._nodes: dict[str, Any] = {}
        self.private: Any = None

    def add(self, table: str, parameter: torch.Tensor) -> None:
        """Registers a leaf without elements as the parameter of a table; takes effect with the next `anchor`."""
        self._parameters[table] = parameter

    def anchor(self, device: torch.device) -> torch.Tensor:
        """Creates the tensor that connects lookups to the private leaf and to all parameters.

        The tensor is an input of every lookup. All lookups share its node, which saves no tensor for the backward pass.
        """
        with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
            self._nodes = {table: _node_of(parameter) for table, parameter in self._parameters.items()}
            leaf = torch.empty(0, dtype=torch.float32, device=device, requires_grad=True)
            self.private = _node_of(leaf)
            by_shape: dict[torch.Size, list[torch.Tensor]] = {}
            for parameter in self._parameters.values():
                by_shape.setdefault(parameter.shape, []).append(parameter)
            # Every backward pass executes the nodes of these operators, so one node is faster than several.
            if len(by_shape) == 1:
                return torch.cat([leaf, *self._parameters.values()])
            return torch.cat([leaf, *(torch.cat(parameters).flatten() for parameters in by_shape.values())])

    def tables_in_inputs(self) -> frozenset[str] | None:
        """Returns the tables whose parameters are in `inputs=` of the running backward pass; None without `inputs`.

        Raises:
            RuntimeError: `torch.autograd.grad` was called with a table's parameter among its inputs.
        """
        if graph_task() == -1 or will_execute(self.private):
            return None
        tables = set()
        for table, node in self._nodes.items():
            try:
                if will_execute(node):
                    tables.add(table)
            except RuntimeError:  # torch raises this for inputs of autograd.grad
                raise RuntimeError(
                    f"torch.autograd.grad cannot return the gradient of table {table!r}, whose parameter has no rows; "
                    "nothing was trained. Leave tables out of its inputs, or call backward(), which trains them "
                    "(update='backward') or makes their gradients .grad of the parameters (update='step')"
                ) from None
        return frozenset(tables)
