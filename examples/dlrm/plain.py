"""The DLRM's tables as torch.nn.EmbeddingBag, for comparison: entirely in memory, with torch's optimizers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

torch.sparse.check_sparse_tensor_invariants.disable()  # already the default; setting it explicitly avoids a warning

CHUNK = 65536  # number of ids in each lookup that copies weights


class PlainTables(nn.Module):
    """A collection with one EmbeddingBag for each feature, over the dense ids 0, 1, ... of its vocabulary."""

    def __init__(self, weights: Mapping[str, Tensor], sparse_gradients: bool) -> None:
        super().__init__()
        self.bags = nn.ModuleDict(
            {
                name: nn.EmbeddingBag.from_pretrained(
                    weight, freeze=False, mode="sum", sparse=sparse_gradients, include_last_offset=True
                )
                for name, weight in weights.items()
            }
        )

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Returns a KeyedTensor, as an EmbeddingBagCollection does."""
        ids = features.to_dict()
        offsets = {name: _bag_offsets(ids[name].lengths()) for name in self.bags}
        pooled = [bag(ids[name].values(), offsets[name]) for name, bag in self.bags.items()]
        return KeyedTensor(list(self.bags), [columns.shape[1] for columns in pooled], torch.cat(pooled, dim=1))


def _bag_offsets(lengths: Tensor) -> Tensor:
    return nn.functional.pad(torch.cumsum(lengths, 0), (1, 0))


def initial_weights(tables: nn.Module, vocabularies: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights [ids, D] that a new cached collection gives to each feature's ids.

    A lookup in eval mode returns the initial weight of an unknown id and inserts nothing, so the collection is still
    empty when training starts.
    """
    was_training = tables.training
    tables.eval()
    longest = max(ids.numel() for ids in vocabularies.values())
    chunks: dict[str, list[Tensor]] = {name: [] for name in vocabularies}
    with torch.no_grad():
        for begin in range(0, longest, CHUNK):
            ids = {name: vocabulary[begin : begin + CHUNK] for name, vocabulary in vocabularies.items()}
            pooled = tables(_one_id_per_bag(ids)).to_dict()
            for name, part in ids.items():
                chunks[name].append(pooled[name][: part.numel()].clone())
    tables.train(was_training)
    return {name: torch.cat(parts) for name, parts in chunks.items()}


def _one_id_per_bag(ids: Mapping[str, Tensor]) -> KeyedJaggedTensor:
    """Returns features whose bag i holds the i-th id; if a feature has fewer ids than others, its last bags are
    empty.
    """
    samples = torch.arange(max(part.numel() for part in ids.values()))
    return KeyedJaggedTensor(
        keys=list(ids),
        values=torch.cat(list(ids.values())),
        lengths=torch.cat([(samples < part.numel()).long() for part in ids.values()]),
    )
