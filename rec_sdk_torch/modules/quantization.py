"""A change of torch's `quantize_dynamic`, and so of TorchRec's `quantize_embeddings`: no tables.

Both replace modules of the classes that they are given, and would leave tables as they are without a word. A
request for dense modules alone goes on. Only what `quantize_dynamic` calls is wrapped, as programs have imported it by
name. Done when the first collection is made, not on import.
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
    """Lets quantization of a model's embeddings raise where the model has tables; wraps once."""
    after_import("torch.ao.quantization.quantize", _wrap)


def _wrap(quantize: Any) -> None:
    quantize.propagate_qconfig_ = _refuse_table_quantization(quantize.propagate_qconfig_)


def _refuse_table_quantization(propagate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(propagate)
    def refusing(module: torch.nn.Module, qconfig_dict: Any = None, *args: Any, **kwargs: Any) -> Any:
        tables = [part.table for part in module.modules() if isinstance(part, TableHandle)]
        asked = [key for key in qconfig_dict or () if isinstance(key, type) and issubclass(key, _EMBEDDINGS)]
        if tables and asked:
            raise TypeError(
                f"tables {tables} cannot be quantized in their model, as {[key.__name__ for key in asked]} are to be. "
                "Export their collection: rec_sdk_torch.export.quantized(rec_sdk_torch.export.to_torchrec(tables)). "
                "Quantize the other modules by themselves"
            )
        return propagate(module, qconfig_dict, *args, **kwargs)

    return refusing
