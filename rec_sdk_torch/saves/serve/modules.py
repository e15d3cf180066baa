"""Exports collections as modules of torch (EmbeddingBag) and TorchRec (collections, also quantized)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from ...modules.collection import CachedCollection
from ...modules.configs import feature_names
from ...tbe import WEIGHT, Pooling
from .arrays import embedding_of
from .id_map import IdMap


class ExportedCollection(torch.nn.Module):
    """Module that maps the ids of a batch to row numbers and looks these up in a collection of TorchRec.

    Inputs and outputs have the form that the exported collection uses in evaluation mode.

    Attributes:
        id_map: maps ids to row numbers.
        collection: TorchRec's collection.
    """

    def __init__(self, id_map: IdMap, collection: torch.nn.Module) -> None:
        super().__init__()
        self.id_map = id_map
        self.collection = collection

    def forward(self, features: KeyedJaggedTensor) -> Any:
        rows = self.id_map(features)
        if isinstance(self.collection, QuantEmbeddingCollection) and rows.variable_stride_per_key():
            return _padded_sequences(self.collection, rows)
        return self.collection(rows)


def _padded_sequences(collection: QuantEmbeddingCollection, rows: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
    """Looks up a batch whose keys have different batch sizes in a collection that requires one batch size.

    Keys with fewer samples are padded with empty samples, which are removed from the output.
    """
    sizes = dict(zip(rows.keys(), rows.stride_per_key(), strict=True))
    max_size = max(sizes.values())
    parts = rows.lengths().split(list(sizes.values()))
    lengths = torch.cat([torch.nn.functional.pad(part, (0, max_size - len(part))) for part in parts])
    output = collection(KeyedJaggedTensor(rows.keys(), rows.values(), lengths=lengths))
    return {
        key: JaggedTensor(part.values(), part.weights_or_none(), part.lengths()[: sizes[key]])
        for key, part in output.items()
    }


def _ids_and_weights(source: CachedCollection) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
    """Returns the ids and weights of each table; ids are None if they are equal to the row numbers.

    If a table has ids, its weights end with a row of zeros for unknown ids.

    Raises:
        ValueError: a table uses MEAN pooling with `padding_idx` or with weights per sample.
    """
    embedding = embedding_of(source)
    ids: list[torch.Tensor | None] = []
    weights = []
    with embedding.exclusive():
        for config in embedding.tables:
            if source.is_weighted() and config.pooling is Pooling.MEAN:
                raise ValueError(
                    f"table {config.name!r}: a MEAN with weights per sample cannot be exported: "
                    "torch.nn.EmbeddingBag supports weights with sums only"
                )
            if config.padding_idx is not None and config.pooling is Pooling.MEAN:
                raise ValueError(f"table {config.name!r}: a MEAN with padding_idx cannot be exported")
            view = embedding.view(config.name)
            known = view.ids()
            if config.padding_idx is not None:
                known = known[known != config.padding_idx]
            weight = view.read(known, [WEIGHT]).parts[WEIGHT]
            if config.hashed or config.padding_idx is not None:
                ids.append(known)
                weight = torch.cat([weight, weight.new_zeros((1, config.embedding_dim))])
            else:
                ids.append(None)
            weights.append(weight)
    return ids, weights


def _id_map(source: CachedCollection, ids: list[torch.Tensor | None]) -> IdMap:
    tables: dict[str, int] = {}
    for position, config in enumerate(source.configs):
        for name in feature_names(config):
            if name in tables:
                raise ValueError(
                    f"feature {name!r} is read by tables {source.configs[tables[name]].name!r} and {config.name!r}: "
                    "an id has a different row in each, so give each table its own feature"
                )
            tables[name] = position
    return IdMap(ids, tables, pooled=source.embedding.pooled)


def to_torchrec(source: CachedCollection) -> ExportedCollection:
    """Copies a collection to the host: an id map, then TorchRec's `EmbeddingBagCollection` or `EmbeddingCollection`.

    Weights are copied exactly. Outputs for known ids are equal to the outputs of `source`, except that bags may be
    summed in another order. An unknown id gives zeros. Keys may have different batch sizes, as in `source`.

    For an index table without `padding_idx`, ids are used as row numbers, and torch raises an error for an id out of
    range. For an index table with `padding_idx`, such an id gives zeros without an error.

    Args:
        source: a collection that is not sharded.

    Raises:
        TypeError: `source` is not a collection of this package, or is sharded.
        ValueError: several tables read one feature, or a table uses MEAN pooling with `padding_idx` or with weights per
            sample.

    Example:
        >>> import torch
        >>> from rec_sdk_torch import EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingBagConfig, export
        >>> config = EmbCacheEmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=4, feature_names=["item"])
        >>> tables = EmbCacheEmbeddingBagCollection([config], cache=10, device="cpu")
        >>> rows = {"embedding_bags.t.ids": torch.tensor([7]), "embedding_bags.t.weight": torch.ones(1, 4)}
        >>> tables.load_state_dict(rows)
        <All keys matched successfully>
        >>> type(export.to_torchrec(tables).collection).__name__
        'EmbeddingBagCollection'
    """
    ids, weights = _ids_and_weights(source)
    id_map = _id_map(source, ids)
    sizes = [len(weight) for weight in weights]
    pooled = source.embedding.pooled
    configs = [_stock_config(config, size, pooled) for config, size in zip(source.configs, sizes, strict=True)]
    collection: Any
    if pooled:
        collection = EmbeddingBagCollection(configs, is_weighted=source.is_weighted(), device=torch.device("cpu"))
        modules = collection.embedding_bags
    else:
        collection = EmbeddingCollection(configs, device=torch.device("cpu"))
        modules = collection.embeddings
    with torch.no_grad():
        for config, weight in zip(configs, weights, strict=True):
            modules[config.name].weight.copy_(weight)
    return ExportedCollection(id_map, collection).eval()


def _stock_config(config: BaseEmbeddingConfig, rows: int, pooled: bool) -> Any:
    cls = EmbeddingBagConfig if pooled else EmbeddingConfig
    names = {field.name for field in dataclasses.fields(cls) if field.init} - {"init_fn"}
    options = {name: getattr(config, name) for name in names if hasattr(config, name)}
    options |= {"num_embeddings": rows, "feature_names": feature_names(config)}
    return cls(**options)


def to_embedding_bags(source: CachedCollection) -> tuple[IdMap, dict[str, torch.nn.EmbeddingBag]]:
    """Returns the id map, and each table as torch's `EmbeddingBag` `[n + 1, D]`, for programs without TorchRec.

    The last row consists of zeros, for unknown ids. It is missing if the table's ids are row numbers.

    Args:
        source: a collection of pooled tables that is not sharded.

    Raises:
        TypeError: `source` is not a collection of this package, is sharded, or holds sequence tables.
        ValueError: several tables read one feature, or a table uses MEAN pooling with `padding_idx` or with weights per
            sample.

    Example:
        >>> import torch
        >>> from rec_sdk_torch import EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingBagConfig, export
        >>> config = EmbCacheEmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=4, feature_names=["item"])
        >>> tables = EmbCacheEmbeddingBagCollection([config], cache=10, device="cpu")
        >>> rows = {"embedding_bags.t.ids": torch.tensor([7]), "embedding_bags.t.weight": torch.ones(1, 4)}
        >>> tables.load_state_dict(rows)
        <All keys matched successfully>
        >>> id_map, bags = export.to_embedding_bags(tables)
        >>> bags["t"].weight.shape  # the last row is for other ids
        torch.Size([2, 4])
    """
    if not embedding_of(source).pooled:
        raise TypeError("torch.nn.EmbeddingBag pools bags, but these are sequence tables: use to_torchrec")
    ids, weights = _ids_and_weights(source)
    bags = {}
    for config, weight in zip(source.embedding.tables, weights, strict=True):
        mode = "mean" if config.pooling is Pooling.MEAN else "sum"
        bags[config.name] = torch.nn.EmbeddingBag.from_pretrained(weight, mode=mode, include_last_offset=True)
    return _id_map(source, ids), bags


_WIDTHS = {torch.qint8: 2, torch.quint4x2: 4}
"""By dtype, a number of which D must be a multiple: fbgemm's quantized rows consist of whole 16-bit words."""


def quantized(exported: ExportedCollection, dtype: torch.dtype = torch.qint8) -> ExportedCollection:
    """Returns the collection with TorchRec's quantized tables: rows of integers, each row with a scale and an offset.

    A dequantized element differs from the original by at most half a quantization step, plus the rounding of scale and
    offset to float16. Half a step is (largest - smallest element of the row) / 510 for `torch.qint8`, and / 30 for
    `torch.quint4x2`.

    Args:
        exported: result of `to_torchrec`.
        dtype: `torch.qint8` or `torch.quint4x2`.

    Raises:
        ValueError: `dtype` is another type, or the D of a table does not fit: it must be even for `torch.qint8`, and a
            multiple of 4 for `torch.quint4x2`.

    Example:
        >>> import torch
        >>> from rec_sdk_torch import EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingBagConfig, export
        >>> config = EmbCacheEmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=4, feature_names=["item"])
        >>> tables = EmbCacheEmbeddingBagCollection([config], cache=10, device="cpu")
        >>> rows = {"embedding_bags.t.ids": torch.tensor([7]), "embedding_bags.t.weight": torch.ones(1, 4)}
        >>> tables.load_state_dict(rows)
        <All keys matched successfully>
        >>> type(export.quantized(export.to_torchrec(tables)).collection).__name__
        'EmbeddingBagCollection'
    """
    if dtype not in _WIDTHS:
        raise ValueError(f"dtype is {dtype}, allowed are {list(_WIDTHS)}")
    stock: Any = exported.collection
    pooled, width = isinstance(stock, EmbeddingBagCollection), _WIDTHS[dtype]
    configs = stock.embedding_bag_configs() if pooled else stock.embedding_configs()
    wrong = {config.name: config.embedding_dim for config in configs if config.embedding_dim % width}
    if wrong:
        raise ValueError(
            f"{dtype} needs an embedding_dim that is a multiple of {width}: tables {wrong} have another one. Keep "
            "them in a collection of their own, which to_torchrec exports as it is"
            + (", or use torch.qint8" if width > 2 and not any(dim % 2 for dim in wrong.values()) else "")
        )
    stock.qconfig = torch.ao.quantization.QConfig(
        activation=torch.ao.quantization.PlaceholderObserver.with_args(dtype=torch.float),
        weight=torch.ao.quantization.PlaceholderObserver.with_args(dtype=dtype),
    )
    cls = QuantEmbeddingBagCollection if pooled else QuantEmbeddingCollection
    try:
        return ExportedCollection(exported.id_map, cls.from_float(stock)).eval()
    finally:
        del stock.qconfig
