"""DLRM (Naumov et al.: Deep Learning Recommendation Model, arXiv:1906.00091)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from support.clicks import ClickBatch
from torch import Tensor, nn


def mlp(sizes: Sequence[int]) -> nn.Sequential:
    """Creates linear layers with a ReLU after each."""
    layers: list[nn.Module] = []
    for size_in, size_out in pairwise(sizes):
        layers += [nn.Linear(size_in, size_out), nn.ReLU()]
    return nn.Sequential(*layers)


class DensePart(nn.Module):
    """The dense part of a DLRM: from dense features and `features` pooled embeddings of `dim` columns to a click's
    logit.
    """

    pairs: Tensor  # int64 [2, pairs]: the pairs of vectors that interact

    def __init__(self, features: int, dim: int, dense_features: int) -> None:
        super().__init__()
        self.dim = dim
        self.bottom = mlp([dense_features, 64, dim])
        pairs = torch.triu_indices(features + 1, features + 1, offset=1)
        self.register_buffer("pairs", pairs, persistent=False)
        self.top = nn.Sequential(mlp([dim + pairs.shape[1], 64, 32]), nn.Linear(32, 1))

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """Returns the logits, float32 [B], from `[B, dense features]` and `[B, features * dim]`."""
        bottom = self.bottom(dense)
        vectors = torch.cat([bottom, pooled], dim=1).view(bottom.shape[0], -1, self.dim)
        products = torch.bmm(vectors, vectors.transpose(1, 2))  # dot products of all pairs of vectors
        interactions = products[:, self.pairs[0], self.pairs[1]]
        logits: Tensor = self.top(torch.cat([bottom, interactions], dim=1)).squeeze(1)
        return logits


class DLRM(nn.Module):
    """A whole DLRM: the embeddings of any collection, and the dense part.

    `embeddings` is any module from a KeyedJaggedTensor to a KeyedTensor of `features` embeddings with `dim` columns
    each: torchrec's EmbeddingBagCollection, an EmbCacheEmbeddingBagCollection, ...
    """

    def __init__(self, embeddings: nn.Module, features: int, dim: int, dense_features: int) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.dense = DensePart(features, dim, dense_features)

    def forward(self, batch: ClickBatch) -> Tensor:
        """Returns the logits, float32 [B]."""
        logits: Tensor = self.dense(batch.dense, self.embeddings(batch.sparse).values())
        return logits
