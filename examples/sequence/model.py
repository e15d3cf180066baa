"""A small attention model: it predicts from a user's earlier clicks whether the user clicks another item.

It follows the Deep Interest Network (Zhou et al., arXiv:1706.06978): the candidate decides which part of the history
matters.
"""

from __future__ import annotations

import torch
from support.clicks import ClickBatch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor


def pad(sequences: JaggedTensor) -> tuple[Tensor, Tensor]:
    """Pads a jagged tensor with zeros; returns the values [B, L, D] and the mask [B, L] of the filled positions."""
    values, lengths = sequences.values(), sequences.lengths()
    longest = int(lengths.max()) if lengths.numel() else 0
    mask = torch.arange(longest) < lengths.unsqueeze(1)
    padded = values.new_zeros(*mask.shape, values.shape[1])
    padded[mask] = values  # the mask selects positions in the order of the values
    return padded, mask


class InterestModel(nn.Module):
    """A model that computes the logit of a click from one candidate item and a jagged history.

    `embeddings` is any module from a KeyedJaggedTensor to a dict with a JaggedTensor for each feature, such as
    torchrec's EmbeddingCollection or an EmbCacheEmbeddingCollection.
    """

    def __init__(self, embeddings: nn.Module, dim: int, hidden: int = 64) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.top = nn.Sequential(
            nn.Linear(3 * dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, batch: ClickBatch) -> Tensor:
        """Returns the logits, float32 [B]."""
        sequences = self.embeddings(batch.sparse)
        candidate = sequences["candidate"].values()  # exactly one for each sample: [B, D]
        interest = self._interest(candidate, *pad(sequences["history"]))
        features = torch.cat([candidate, interest, candidate * interest], dim=1)
        logits: Tensor = self.top(features).squeeze(1)
        return logits

    def _interest(self, candidate: Tensor, history: Tensor, mask: Tensor) -> Tensor:
        """Returns the part of the history that the candidate attends to, [B, D], or zeros if there is no history."""
        scores = torch.einsum("bd,bld->bl", self.query(candidate), self.key(history)) / candidate.shape[1] ** 0.5
        # An additional position with score and value zero keeps the softmax of an empty history defined.
        scores = nn.functional.pad(scores.masked_fill(~mask, -torch.inf), (0, 1))
        weights = scores.softmax(dim=1)[:, :-1]
        return torch.einsum("bl,bld->bd", weights, history)
