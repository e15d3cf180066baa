"""Edges of the autograd graph from lookups to the tables' parameters, by which torch decides which tables train."""

from __future__ import annotations

from typing import Any

import torch

will_execute = torch._C._will_engine_execute_node
"""Whether the running backward pass reaches a node of the autograd graph; RuntimeError outside of one."""
graph_task = torch._C._current_graph_task_id
"""The number of the running backward pass; -1 outside of one, and where compiled autograd runs it."""


def _node_of(leaf: torch.Tensor) -> Any:
    """Returns the node that accumulates the gradient of a leaf."""
    with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
        view: Any = leaf.view_as(leaf)
        return view.grad_fn.next_functions[0][0]


class ParameterEdges:
    """The inputs of an embedding's lookups in the autograd graph: the parameters of its tables.

    No gradient goes along an edge. It makes torch run the backward pass of a lookup where `backward(inputs=...)` names
    a parameter.

    Attributes:
        private: the node of a leaf that no `inputs=` can name: only a backward pass without them reaches it.
    """

    def __init__(self) -> None:
        self._parameters: dict[str, torch.Tensor] = {}
        self._nodes: dict[str, Any] = {}
        self.private: Any = None

    def add(self, table: str, parameter: torch.Tensor) -> None:
        """Makes `parameter`, a leaf without elements, the parameter of a table. Anchors of before do not lead to it."""
        self._parameters[table] = parameter

    def anchor(self, device: torch.device) -> torch.Tensor:
        """Makes the tensor that stands for the private leaf and all parameters as the input of lookups.

        All lookups share its node, which saves no tensors for its backward pass.
        """
        with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
            self._nodes = {table: _node_of(parameter) for table, parameter in self._parameters.items()}
            leaf = torch.empty(0, dtype=torch.float32, device=device, requires_grad=True)
            self.private = _node_of(leaf)
            of_shapes: dict[torch.Size, list[torch.Tensor]] = {}
            for parameter in self._parameters.values():
                of_shapes.setdefault(parameter.shape, []).append(parameter)
            if len(of_shapes) == 1:  # one node, which each backward pass goes through
                return torch.cat([leaf, *self._parameters.values()])
            return torch.cat([leaf, *(torch.cat(parameters).flatten() for parameters in of_shapes.values())])

    def requested(self) -> frozenset[str] | None:
        """Returns the tables that the running backward pass trains, None for all: those that its `inputs=` name.

        Raises:
            RuntimeError: `torch.autograd.grad` is to return the gradient of a table.
        """
        if graph_task() == -1 or will_execute(self.private):
            return None
        tables = set()
        for table, node in self._nodes.items():
            try:
                if will_execute(node):
                    tables.add(table)
            except RuntimeError:  # torch refuses the question for the inputs of autograd.grad
                raise RuntimeError(
                    f"torch.autograd.grad cannot return the gradient of table {table!r}, whose parameter has no rows; "
                    "nothing was trained. Leave tables out of its inputs, or call backward(), which trains them "
                    "(update='backward') or makes their gradients .grad of the parameters (update='step')"
                ) from None
        return frozenset(tables)
