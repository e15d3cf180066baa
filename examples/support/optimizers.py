"""The optimizers: several to choose from for the tables, and Adam for all other parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad


@dataclass(frozen=True)
class TableOptimizer:
    """An optimizer for embedding tables."""

    optimizer_class: type[torch.optim.Optimizer]
    default_lr: float
    takes_sparse_gradients: bool = True  # whether it accepts the gradients of torch.nn.EmbeddingBag(sparse=True)
    eps: float | None = None  # passed explicitly where the default for sharded tables differs from the class's default

    def options(self, lr: float) -> dict[str, float]:
        """Returns the keywords for the class."""
        return {"lr": lr} if self.eps is None else {"lr": lr, "eps": self.eps}

    def create(self, parameters: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
        """Creates the optimizer. It is for tables that are not updated in the backward pass."""
        return self.optimizer_class(parameters, **self.options(lr))  # type: ignore[arg-type]  # of torch's classes


TABLE_OPTIMIZERS = {
    "sgd": TableOptimizer(torch.optim.SGD, 1.0),
    "adagrad": TableOptimizer(torch.optim.Adagrad, 0.05, eps=1e-10),
    "adam": TableOptimizer(torch.optim.SparseAdam, 0.002),
    "rowwise_adagrad": TableOptimizer(RowWiseAdagrad, 0.05, takes_sparse_gradients=False, eps=1e-10),
}


def dense_optimizer(model: nn.Module, lr: float) -> KeyedOptimizerWrapper:
    """Creates Adam for every parameter of a model except its `embeddings`."""
    dense = {name: p for name, p in model.named_parameters() if not name.startswith("embeddings.")}
    return KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adam(parameters, lr=lr))
