"""A patch that makes torch's `quantize_dynamic` and TorchRec's `quantize_embeddings` reject models with tables.

Both functions replace modules of the classes passed to them, and would silently leave tables unquantized. Quantization
of dense modules alone continues to work. The patch wraps a function that `quantize_dynamic` calls, because programs
may have imported `quantize_dynamic` itself by name. It is installed when the first collection is created.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface

from ..optim.handles import TableHandle
from ..runtime.imports import after_import

_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag, EmbeddingBagCollectionInterface, EmbeddingCollectionInterface)


@functools.cache
def refuse_quantization() -> None:
    """Makes quantization of embeddings raise an error for models with tables; installs the patch once."""
    after_import("torch.ao.quantization.quantize", _wrap)


def _wrap(quantize: Any) -> None:
    quantize.propagate_qconfig_ = _refuse_table_quantization(quantize.propagate_qconfig_)


def _refuse_table_quantization(propagate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(propagate)
    def refusing(module: torch.nn.Module, qconfig_dict: Any = None, *args: Any, **kwargs: Any) -> Any:
        tables = [part.table for part in module.modules() if isinstance(part, TableHandle)]
        classes = [key for key in qconfig_dict or () if isinstance(key, type) and issubclass(key, _EMBEDDINGS)]
        if tables and classes:
            raise TypeError(
                f"tables {tables} cannot be quantized inside a model, as requested for "
                f"{[each.__name__ for each in classes]}. Export their collection instead: "
                "rec_sdk_torch.export.quantized(rec_sdk_torch.export.to_torchrec(tables)). Quantize dense modules "
                "without these classes"
            )
        return propagate(module, qconfig_dict, *args, **kwargs)

    return refusing
