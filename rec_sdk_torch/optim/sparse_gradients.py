"""`SparseGradients`: a table optimizer that updates no rows and keeps the gradients for the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class SparseGradients(torch.optim.Optimizer):
    """Optimizer for tables only: the backward pass sums the gradients of each row and leaves the rows unchanged.

    `collection.take_gradients()` returns the gradients aggregated since its last call.

    Args:
        params: parameters of tables, passed by `apply_optimizer_in_backward`.

    Raises:
        RuntimeError: raised by `step()` if it is used for parameters that are not tables.

    Example:
        >>> import torch
        >>> from torchrec import KeyedJaggedTensor
        >>> from rec_sdk_torch import EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingBagConfig
        >>> from rec_sdk_torch import SparseGradients, apply_optimizer_in_backward
        >>> config = EmbCacheEmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=4, feature_names=["item"])
        >>> tables = EmbCacheEmbeddingBagCollection([config], cache=10, device="cpu")
        >>> apply_optimizer_in_backward(SparseGradients, tables.parameters(), {})
        >>> batch = KeyedJaggedTensor(["item"], torch.tensor([7, 7]), lengths=torch.tensor([2]))
        >>> tables(batch).values().sum().backward()
        >>> taken = tables.take_gradients()["t"]
        >>> taken.ids.tolist(), taken.rows.tolist()
        ([7], [[2.0, 2.0, 2.0, 2.0]])
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Raises RuntimeError: parameters that are not tables keep their gradients even without this optimizer."""
        raise RuntimeError(
            "SparseGradients is for embedding tables: other parameters keep their gradients in grad without it"
        )
