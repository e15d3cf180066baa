"""Accumulate variants of TorchRec's optimizers, see `accumulate`.

All but RowWiseAdagrad stand in TorchRec for an optimizer of tables: on other parameters their `step` raises.
"""

from __future__ import annotations

import torchrec.optim

from .accumulate import Accumulating


class AccumulateRowWiseAdagrad(Accumulating, torchrec.optim.RowWiseAdagrad):
    """RowWiseAdagrad with one update per `accumulate_step` backward passes, on the sum of their gradients.

    Example:
        >>> from rec_sdk_torch import AccumulateRowWiseAdagrad, EmbCacheEmbeddingBagCollection
        >>> from rec_sdk_torch import EmbCacheEmbeddingBagConfig, apply_optimizer_in_backward
        >>> config = EmbCacheEmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=4, feature_names=["item"])
        >>> tables = EmbCacheEmbeddingBagCollection([config], cache=10, device="cpu")
        >>> options = {"lr": 0.1, "use_accumulate": True, "accumulate_step": 4}
        >>> apply_optimizer_in_backward(AccumulateRowWiseAdagrad, tables.parameters(), options)
    """


class AccumulateLAMB(Accumulating, torchrec.optim.LAMB):
    """LAMB with one update per `accumulate_step` backward passes, on the sum of their gradients.

    Example:
        >>> from rec_sdk_torch import AccumulateLAMB, EmbCacheEmbeddingBagCollection
        >>> from rec_sdk_torch import EmbCacheEmbeddingBagConfig, apply_optimizer_in_backward
        >>> config = EmbCacheEmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=4, feature_names=["item"])
        >>> tables = EmbCacheEmbeddingBagCollection([config], cache=10, device="cpu")
        >>> options = {"lr": 0.1, "use_accumulate": True, "accumulate_step": 4}
        >>> apply_optimizer_in_backward(AccumulateLAMB, tables.parameters(), options)
    """


class AccumulateLarsSGD(Accumulating, torchrec.optim.LarsSGD):
    """LarsSGD with one update per `accumulate_step` backward passes, on the sum of their gradients.

    Example:
        >>> from rec_sdk_torch import AccumulateLarsSGD, EmbCacheEmbeddingBagCollection
        >>> from rec_sdk_torch import EmbCacheEmbeddingBagConfig, apply_optimizer_in_backward
        >>> config = EmbCacheEmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=4, feature_names=["item"])
        >>> tables = EmbCacheEmbeddingBagCollection([config], cache=10, device="cpu")
        >>> options = {"lr": 0.1, "use_accumulate": True, "accumulate_step": 4}
        >>> apply_optimizer_in_backward(AccumulateLarsSGD, tables.parameters(), options)
    """


class AccumulatePartialRowWiseAdam(Accumulating, torchrec.optim.PartialRowWiseAdam):
    """PartialRowWiseAdam with one update per `accumulate_step` backward passes, on the sum of their gradients.

    Example:
        >>> from rec_sdk_torch import AccumulatePartialRowWiseAdam, EmbCacheEmbeddingBagCollection
        >>> from rec_sdk_torch import EmbCacheEmbeddingBagConfig, apply_optimizer_in_backward
        >>> config = EmbCacheEmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=4, feature_names=["item"])
        >>> tables = EmbCacheEmbeddingBagCollection([config], cache=10, device="cpu")
        >>> options = {"lr": 0.1, "use_accumulate": True, "accumulate_step": 4}
        >>> apply_optimizer_in_backward(AccumulatePartialRowWiseAdam, tables.parameters(), options)
    """


class AccumulatePartialRowWiseLAMB(Accumulating, torchrec.optim.PartialRowWiseLAMB):
    """PartialRowWiseLAMB with one update per `accumulate_step` backward passes, on the sum of their gradients.

    Example:
        >>> from rec_sdk_torch import AccumulatePartialRowWiseLAMB, EmbCacheEmbeddingBagCollection
        >>> from rec_sdk_torch import EmbCacheEmbeddingBagConfig, apply_optimizer_in_backward
        >>> config = EmbCacheEmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=4, feature_names=["item"])
        >>> tables = EmbCacheEmbeddingBagCollection([config], cache=10, device="cpu")
        >>> options = {"lr": 0.1, "use_accumulate": True, "accumulate_step": 4}
        >>> apply_optimizer_in_backward(AccumulatePartialRowWiseLAMB, tables.parameters(), options)
    """
