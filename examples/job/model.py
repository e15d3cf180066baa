"""A DLRM in the form that train pipelines expect: tables with a device cache and their optimizer, and a dense part."""

from __future__ import annotations

import torch
from dlrm.cached import cached_tables
from dlrm.model import DensePart
from support.clicks import ClickBatch, ClickData
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel

from rec_sdk_torch import EmbCacheEmbeddingBagCollection, apply_optimizer_in_backward


class ClickModel(nn.Module):
    """A DLRM whose forward pass returns loss and logits, as train pipelines expect."""

    def __init__(self, embeddings: nn.Module, dense: DensePart) -> None:
        """Initializes the model.

        Args:
            embeddings: module from a KeyedJaggedTensor to a KeyedTensor with the columns that `dense` takes.
            dense: the dense part.
        """
        super().__init__()
        self.embeddings, self.dense = embeddings, dense

    def forward(self, batch: ClickBatch) -> tuple[Tensor, Tensor]:
        """Returns the mean loss and the logits, float32 [B]. Ids may be on the host, other parts of the batch on any
        device.
        """
        pooled = self.embeddings(batch.sparse).values()
        logits = self.dense(batch.dense.to(pooled.device), pooled)
        labels = batch.labels.to(pooled.device)
        return nn.functional.binary_cross_entropy_with_logits(logits, labels), logits


def build_tables(
    data: ClickData, dim: int, seed: int, share: float, batch_size: int, lr: float, device: torch.device | None = None
) -> EmbCacheEmbeddingBagCollection:
    """Creates one table per feature, updated by Adagrad in the backward pass; changes are recorded for deltas."""
    tables = cached_tables(data, batch_size, share, dim, seed, device, keeps_changes=True)
    apply_optimizer_in_backward(torch.optim.Adagrad, tables.parameters(), {"lr": lr, "eps": 1e-10})
    return tables


def build_dense(data: ClickData, dim: int, seed: int) -> DensePart:
    """Creates the dense part on the CPU. The seed alone determines its weights."""
    torch.manual_seed(seed)
    return DensePart(len(data.features), dim, data.dense.shape[1])


def click_model(model: nn.Module) -> ClickModel:
    """Returns the ClickModel inside a model returned by `divide`."""
    inside = model.module if isinstance(model, DistributedModelParallel) else model
    assert isinstance(inside, ClickModel)
    return inside
