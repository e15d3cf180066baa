"""An optimizer of tables that updates nothing: gradients are handed out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class SparseGradients(torch.optim.Optimizer):
    """The backward pass aggregates a table's gradients per row, and leaves its rows alone.

    `collection.take_gradients()` gives what was aggregated since it was last called. For tables only.

    Args:
        params: tables' parameters, as `apply_optimizer_in_backward` hands them on.

    Raises:
        RuntimeError: by `step()`, for other parameters.

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
        """Raises RuntimeError: other parameters keep their gradients without it."""
        raise RuntimeError("SparseGradients is for embedding tables: other parameters have their grad without it")
