"""Exports the tables of a model as numpy arrays and safetensors files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ...modules.collection import CachedCollection
from ...tbe import WEIGHT, TableBatchedEmbedding, TableView
from ..format.file_writer import FileWriter
from ..format.tensors import TensorLayout, TensorSpec, TensorWriter

Tables = CachedCollection | TableBatchedEmbedding


def embedding_of(tables: Tables) -> TableBatchedEmbedding:
    """Returns the table-batched embedding of a collection, or `tables` itself if it is an embedding.

    Raises:
        TypeError: `tables` is another object, or a sharded collection, of which a rank has only a part of the rows.
            Export a sharded collection from a save.
    """
    if isinstance(tables, Tables):
        tables.sync_optimizers()
        return tables.embedding
    raise TypeError(f"{type(tables).__name__} has no tables to export: pass an unsharded collection or embedding")


def to_arrays(tables: Tables) -> dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.generic]]]:
    """Returns the ids, int64 `[n]`, and the weights, `[n, D]`, of each table, by table name.

    Weights have the table's data type, except that bfloat16 becomes float32, because numpy has no bfloat16.

    Args:
        tables: a collection that is not sharded, or a `TableBatchedEmbedding`.

    Raises:
        TypeError: `tables` is not a collection or embedding of this package, or is sharded.

    Example:
        >>> import torch
        >>> from rec_sdk_torch import TableBatchedEmbedding, TableConfig, TableOptimizer, export
        >>> sgd = TableOptimizer.create(torch.optim.SGD, {"lr": 0.1})
        >>> embedding = TableBatchedEmbedding([TableConfig("t", 100, 4)], optimizer=sgd, cache=10)
        >>> embedding(torch.tensor([7]), torch.tensor([0, 1])).sum().backward()
        >>> ids, weights = export.to_arrays(embedding)["t"]
        >>> ids.tolist(), weights.shape
        ([7], (1, 4))
    """
    embedding = embedding_of(tables)
    result = {}
    with embedding.exclusive():
        for config in embedding.tables:
            view = embedding.view(config.name)
            ids = view.ids()
            weight = view.read(ids, [WEIGHT]).parts[WEIGHT]
            result[config.name] = ids.numpy(), (weight.float() if weight.dtype == torch.bfloat16 else weight).numpy()
    return result


def to_safetensors(tables: Tables, folder: str | os.PathLike[str]) -> list[Path]:
    """Writes `<table>.safetensors` for each table, with `ids` int64 `[n]` and `weight` `[n, D]`.

    Rows are written in chunks, so that large tables need little memory.

    Args:
        tables: a collection that is not sharded, or a `TableBatchedEmbedding`.
        folder: target folder; it is created if it does not exist.

    Returns:
        The paths of the files.

    Raises:
        TypeError: `tables` is not a collection or embedding of this package, or is sharded.
        OSError: a file exists already, or the disk is full; an incomplete file is removed.

    Example:
        >>> import tempfile, torch
        >>> from rec_sdk_torch import TableBatchedEmbedding, TableConfig, TableOptimizer, export
        >>> sgd = TableOptimizer.create(torch.optim.SGD, {"lr": 0.1})
        >>> embedding = TableBatchedEmbedding([TableConfig("t", 100, 4)], optimizer=sgd, cache=10)
        >>> embedding(torch.tensor([7]), torch.tensor([0, 1])).sum().backward()
        >>> [path.name for path in export.to_safetensors(embedding, tempfile.mkdtemp())]
        ['t.safetensors']
    """
    embedding = embedding_of(tables)
    Path(folder).mkdir(parents=True, exist_ok=True)
    with embedding.exclusive():
        return [_write(embedding.view(config.name), Path(folder)) for config in embedding.tables]


def _write(view: TableView, folder: Path) -> Path:
    path = folder / f"{view.config.name}.safetensors"
    if path.exists():
        raise FileExistsError(f"{path} exists already")
    specs = [
        TensorSpec("ids", view.ids().dtype, (view.count(),)),
        TensorSpec(WEIGHT, view.config.weight_dtype, (view.count(), view.config.embedding_dim)),
    ]
    file = FileWriter(path)
    try:
        with file:
            writer = TensorWriter(file, TensorLayout(specs))
            for chunk in view.chunks([WEIGHT]):
                writer.append("ids", chunk.ids)
                writer.append(WEIGHT, chunk.parts[WEIGHT])
            writer.finish()
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path
