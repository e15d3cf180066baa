"""The plain twin: the same tables as torch.nn.EmbeddingBag, wholly in memory, with torch's optimizers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

torch.sparse.check_sparse_tensor_invariants.disable()  # its default, but said aloud it does not warn

CHUNK = 65536  # ids per lookup while the weights are copied


class PlainTables(nn.Module):
    """One EmbeddingBag per feature, over the dense ids 0, 1, ... of its vocabulary."""

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
        """The output of an EmbeddingBagCollection."""
        ids = features.to_dict()
        offsets = {name: _bag_offsets(ids[name].lengths()) for name in self.bags}
        pooled = [bag(ids[name].values(), offsets[name]) for name, bag in self.bags.items()]
        return KeyedTensor(list(self.bags), [columns.shape[1] for columns in pooled], torch.cat(pooled, dim=1))


def _bag_offsets(lengths: Tensor) -> Tensor:
    return nn.functional.pad(torch.cumsum(lengths, 0), (1, 0))


def initial_weights(tables: nn.Module, vocabularies: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights [ids, D] that a new cached collection gives to each feature's ids.

    A lookup in eval mode shows an unknown id's initial weight and inserts nothing, so the collection
    still starts its training empty.
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
    """Bag i holds the i-th id; the bags of a shorter feature end up empty."""
    samples = torch.arange(max(part.numel() for part in ids.values()))
    return KeyedJaggedTensor(
        keys=list(ids),
        values=torch.cat(list(ids.values())),
        lengths=torch.cat([(samples < part.numel()).long() for part in ids.values()]),
    )
