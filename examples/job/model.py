"""A DLRM as train pipelines want it: tables with a device cache and their optimizer, and a dense part."""

from __future__ import annotations

import torch
from dlrm.cached import cached_tables
from dlrm.model import DensePart
from support.clicks import ClickBatch, ClickData
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel

from rec_sdk_torch import EmbCacheEmbeddingBagCollection, apply_optimizer_in_backward


class ClickModel(nn.Module):
    """Loss and logits of a batch, as train pipelines want them."""

    def __init__(self, embeddings: nn.Module, dense: DensePart) -> None:
        """`embeddings`: from a KeyedJaggedTensor to a KeyedTensor with the columns that `dense` takes."""
        super().__init__()
        self.embeddings, self.dense = embeddings, dense

    def forward(self, batch: ClickBatch) -> tuple[Tensor, Tensor]:
        """The mean loss, and the logits, float32 [B]; ids may be on the host and other parts anywhere."""
        pooled = self.embeddings(batch.sparse).values()
        logits = self.dense(batch.dense.to(pooled.device), pooled)
        labels = batch.labels.to(pooled.device)
        return nn.functional.binary_cross_entropy_with_logits(logits, labels), logits


def build_tables(
    data: ClickData, dim: int, seed: int, share: float, batch_size: int, lr: float, device: torch.device | None = None
) -> EmbCacheEmbeddingBagCollection:
    """A table for each feature, with Adagrad in its backward pass; tables remember what a delta has to have."""
    tables = cached_tables(data, batch_size, share, dim, seed, device, keeps_changes=True)
    apply_optimizer_in_backward(torch.optim.Adagrad, tables.parameters(), {"lr": lr, "eps": 1e-10})
    return tables


def build_dense(data: ClickData, dim: int, seed: int) -> DensePart:
    """The dense part on the CPU; its weights follow from the seed."""
    torch.manual_seed(seed)
    return DensePart(len(data.features), dim, data.dense.shape[1])


def whole(model: nn.Module) -> ClickModel:
    """The model inside of what `divide` gave."""
    inside = model.module if isinstance(model, DistributedModelParallel) else model
    assert isinstance(inside, ClickModel)
    return inside
