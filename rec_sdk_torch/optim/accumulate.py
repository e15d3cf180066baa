"""Accumulate optimizers: one update with the summed gradients of `accumulate_step` backward passes.

For embedding tables, `apply_optimizer_in_backward` recognizes these classes and keeps an accumulation buffer with the
device cache. For other parameters they are ordinary optimizers: `step()` is called once per backward pass, and every
`accumulate_step`-th call updates the parameters with the sum (not the mean) of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..tbe import check_window

_ON_PARAMETERS = """Example:
    >>> import torch
    >>> from rec_sdk_torch import {name}
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = {name}([weight], lr=0.1, use_accumulate=True, accumulate_step=2)
    >>> weight.grad = torch.ones(2)
    >>> optimizer.step()  # only adds to the buffer
    >>> weight.tolist()
    [0.0, 0.0]
"""


class Accumulating(torch.optim.Optimizer):
    """Base class that accumulates gradients before the `step` of the base optimizer.

    A subclass passes an `example` that is appended to its docstring, with `{name}` replaced by the class name.

    Args:
        params: the parameters to optimize.
        args, kwargs: other arguments of the base optimizer.
        use_accumulate: whether to accumulate gradients; False: each backward pass is followed by an update.
        accumulate_step: number of backward passes per update, at least 1. The update uses the sum of their gradients.

    Raises:
        TypeError: `use_accumulate` is not a bool, or `accumulate_step` is not an integer.
        ValueError: `accumulate_step` is below 1, or above 1 without `use_accumulate`.
    """

    def __init_subclass__(cls, example: str = "") -> None:
        super().__init_subclass__()
        if cls.__doc__ and example:
            cls.__doc__ += "\n\n" + example.format(name=cls.__name__)

    def __init__(
        self, params: Any, *args: Any, use_accumulate: bool = False, accumulate_step: int = 1, **kwargs: Any
    ) -> None:
        super().__init__(params, *args, **kwargs)
        self._length = check_window(type(self).__name__, use_accumulate, accumulate_step)
        self._backwards = 0
        self._sums: dict[torch.Tensor, torch.Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        window = {name: self.__dict__[name] for name in ("_length", "_backwards", "_sums")}
        return {**super().__getstate__(), **window}

    def _parameters(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def _add_gradients(self) -> None:
        for param in self._parameters():
            if param.grad is not None:
                total = self._sums.get(param)
                self._sums[param] = param.grad.clone() if total is None else total.add_(param.grad)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Adds the gradients to the buffer; every `accumulate_step`-th call updates the parameters with their sum."""
        loss = closure() if closure is not None else None
        self._backwards += 1
        self._add_gradients()
        if self._backwards == self._length:
            for param, total in self._sums.items():
                param.grad = total
            self._sums.clear()
            self._backwards = 0
            super().step()
        return loss


class AccumulateSGD(Accumulating, torch.optim.SGD, example=_ON_PARAMETERS):
    """SGD with one update per `accumulate_step` backward passes, on the sum of their gradients."""


class AccumulateAdagrad(Accumulating, torch.optim.Adagrad, example=_ON_PARAMETERS):
    """Adagrad with one update per `accumulate_step` backward passes, on the sum of their gradients."""


class AccumulateAdadelta(Accumulating, torch.optim.Adadelta, example=_ON_PARAMETERS):
    """Adadelta with one update per `accumulate_step` backward passes, on the sum of their gradients."""


class AccumulateRMSprop(Accumulating, torch.optim.RMSprop, example=_ON_PARAMETERS):
    """RMSprop with one update per `accumulate_step` backward passes, on the sum of their gradients."""


def _with_every_row(grad: torch.Tensor) -> torch.Tensor:
    """Returns `grad` as a sparse tensor that contains all rows, also rows of zeros, which `to_sparse` would omit."""
    rows = grad if grad.dim() else grad[None]
    row_indices = torch.arange(len(rows), device=grad.device)[None] if grad.dim() else rows.new_empty((0, 1)).long()
    return torch.sparse_coo_tensor(
        row_indices, rows, grad.shape, device=grad.device, is_coalesced=True, check_invariants=False
    )


class _DenseAsSparse(torch.optim.SparseAdam):
    """SparseAdam that also accepts dense gradients, as sparse gradients that contain all rows."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and not param.grad.is_sparse:
                    param.grad = _with_every_row(param.grad)
        return super().step(closure)


class AccumulateAdam(Accumulating, _DenseAsSparse, example=_ON_PARAMETERS):
    """SparseAdam with one update per `accumulate_step` backward passes, on the sum of their gradients."""


class AccumulateAdamW(Accumulating, torch.optim.AdamW, example=_ON_PARAMETERS):
    """AdamW with one update per `accumulate_step` backward passes, on the sum of their gradients."""
