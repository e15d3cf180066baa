"""Accumulate variants of TorchRec's optimizers; `accumulate.py` has the variants of torch's.

Except for RowWiseAdagrad, TorchRec's classes only name an optimizer of tables: for other parameters, `step` raises.
"""

from __future__ import annotations

import torchrec.optim

from .accumulate import Accumulating

_ON_TABLES = """Example:
    >>> from rec_sdk_torch import {name}, EmbCacheEmbeddingBagCollection
    >>> from rec_sdk_torch import EmbCacheEmbeddingBagConfig, apply_optimizer_in_backward
    >>> config = EmbCacheEmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=4, feature_names=["item"])
    >>> tables = EmbCacheEmbeddingBagCollection([config], cache=10, device="cpu")
    >>> options = {{"lr": 0.1, "use_accumulate": True, "accumulate_step": 4}}
    >>> apply_optimizer_in_backward({name}, tables.parameters(), options)
"""


class AccumulateRowWiseAdagrad(Accumulating, torchrec.optim.RowWiseAdagrad, example=_ON_TABLES):
    """RowWiseAdagrad with one update per `accumulate_step` backward passes, on the sum of their gradients."""


class AccumulateLAMB(Accumulating, torchrec.optim.LAMB, example=_ON_TABLES):
    """LAMB with one update per `accumulate_step` backward passes, on the sum of their gradients."""


class AccumulateLarsSGD(Accumulating, torchrec.optim.LarsSGD, example=_ON_TABLES):
    """LarsSGD with one update per `accumulate_step` backward passes, on the sum of their gradients."""


class AccumulatePartialRowWiseAdam(Accumulating, torchrec.optim.PartialRowWiseAdam, example=_ON_TABLES):
    """PartialRowWiseAdam with one update per `accumulate_step` backward passes, on the sum of their gradients."""


class AccumulatePartialRowWiseLAMB(Accumulating, torchrec.optim.PartialRowWiseLAMB, example=_ON_TABLES):
    """PartialRowWiseLAMB with one update per `accumulate_step` backward passes, on the sum of their gradients."""
