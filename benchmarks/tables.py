"""Tables that benchmarks train: collections of ours and of TorchRec, and a single table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import rec_sdk_torch
from rec_sdk_torch.tbe import TableBatchedEmbedding, TableConfig, TableOptimizer

from .runner import CannotRunError


class NotAvailableError(CannotRunError):
    """Raised when a contender cannot run; the message is the reason."""


def import_torchrec() -> Any:
    """Imports TorchRec.

    Raises:
        NotAvailableError: TorchRec cannot be imported.
    """
    try:
        import torchrec
    except (ImportError, OSError) as error:
        raise NotAvailableError(f"torchrec cannot be imported: {error}") from error
    return torchrec


def configs(sizes: Sequence[tuple[int, int]], **more: Any) -> list[dict[str, Any]]:
    """Returns the config fields of one table per (rows, D): table `t0` with feature `f0`, `t1` with `f1`, and so on."""
    return [
        {"name": f"t{i}", "feature_names": [f"f{i}"], "num_embeddings": rows, "embedding_dim": dim, **more}
        for i, (rows, dim) in enumerate(sizes)
    ]


def make_collection(
    tables: Sequence[Mapping[str, Any]],
    optimizer: type[torch.optim.Optimizer],
    keywords: Mapping[str, Any],
    pooled: bool = True,
    prefix: str = "EmbCache",
    **options: Any,
) -> Any:
    """Builds a collection updated in its backward pass; `prefix` "" gives TorchRec's class, or its config with ours.

    Args:
        tables: the fields of the configs.
        optimizer: the optimizer's class.
        keywords: the optimizer's keywords.
        pooled: whether the output is pooled.
        prefix: prefix of the class; the config classes have the same prefix, or `config_prefix` if it is passed.
        options: further arguments of the collection.
    """
    torchrec = import_torchrec()
    kind = "EmbeddingBag" if pooled else "Embedding"
    config_prefix = options.pop("config_prefix", prefix)
    config = getattr(rec_sdk_torch if config_prefix else torchrec, f"{config_prefix}{kind}Config")
    package = rec_sdk_torch if prefix else torchrec
    made = getattr(package, f"{prefix}{kind}Collection")(tables=[config(**fields) for fields in tables], **options)
    apply = rec_sdk_torch.apply_optimizer_in_backward if prefix else torchrec.optim.apply_optimizer_in_backward
    apply(optimizer, made.parameters(), dict(keywords))
    return made


def make_table(table: TableConfig, optimizer: type[torch.optim.Optimizer], **options: Any) -> TableBatchedEmbedding:
    """Builds a table-batched embedding of one table."""
    return TableBatchedEmbedding([table], optimizer=TableOptimizer.create(optimizer, {"lr": 0.1}), **options)
