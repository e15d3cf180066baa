"""Exports the tables of a checkpoint to files of ids and weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from ...tbe import Int64Array
from ..format.errors import CheckpointError
from ..format.file_writer import FileWriter
from ..format.folders import Paths, chain_of, latest_save, to_paths
from ..format.manifest import REMOVED, ROWS
from ..format.quantized import BITS
from ..format.tensors import DTYPES, TensorLayout, TensorReader, TensorSpec, TensorWriter
from ..format.validation import TableChain, open_file, table_chain
from ..load.save_reader import verify_files, verify_tables

_CHUNK_ROWS = 1 << 16
"""Number of rows in memory at a time when safetensors files are written."""


Opener = Callable[[], TensorReader]
"""Function that opens a file of tensors."""


def _latest_rows(tables: TableChain) -> tuple[Int64Array, Int64Array, Int64Array, list[Opener]]:
    """Finds the file that has the latest row of each id of a table.

    Returns:
        The ids; for each id the index of its file; for each id the row number in this file; and, for each file, a
        function that opens it.
    """
    openers: list[Opener] = []
    ids = files = rows = np.empty(0, np.int64)
    for folder, manifest, table in tables.saves:
        for file in manifest.files_of(table.key, REMOVED, ROWS):
            opener = functools.partial(open_file, folder, manifest, file)
            with opener() as reader:
                new_ids = reader.read("ids").numpy()
            kept = ~np.isin(ids, new_ids) if len(ids) else np.empty(0, bool)
            ids, files, rows = ids[kept], files[kept], rows[kept]
            if file.role == ROWS:
                ids = np.concatenate([ids, new_ids])
                files = np.concatenate([files, np.full(len(new_ids), len(openers))])
                rows = np.concatenate([rows, np.arange(len(new_ids))])
                openers.append(opener)
    return ids, files, rows, openers


def _read_weights(files: Int64Array, rows: Int64Array, openers: Sequence[Opener]) -> Iterator[torch.Tensor]:
    """Yields the weights of the given rows in chunks; the rows are sorted by file and row number."""
    for number, opener in enumerate(openers):
        file_rows = rows[files == number]
        if not len(file_rows):
            continue
        with opener() as reader:
            for begin in range(0, reader.specs["weight"].shape[0], _CHUNK_ROWS):
                chunk_rows = file_rows[
                    np.searchsorted(file_rows, begin) : np.searchsorted(file_rows, begin + _CHUNK_ROWS)
                ]
                if len(chunk_rows):
                    end = int(chunk_rows[-1]) + 1
                    yield reader.read("weight", begin, end)[torch.from_numpy(chunk_rows - begin)]


def export(path: Paths, output: Path, kind: str = "safetensors", tables: Sequence[str] | None = None) -> list[Path]:
    """Writes `ids` int64 `[n]` and `weight` `[n, D]` of tables to `output/<table>.safetensors` or `.npz`.

    Args:
        path: a save, or one or several folders of saves, of which the latest save is exported. If it is a delta, all
            saves of its chain are combined.
        output: target folder; it is created if it does not exist.
        kind: `safetensors`, with weights in the saved data type, or `npz`, where bfloat16 becomes float32.
        tables: keys of the tables; None for all.

    Returns:
        The paths of the files.

    Raises:
        CheckpointError: the save is missing, damaged or quantized, or lacks a table.
        FileExistsError: a file exists already.
    """
    chain = chain_of(latest_save(path), to_paths(path))
    manifest = chain[-1][1]
    known = [table.key for table in manifest.tables]
    unknown = sorted(set(tables or ()) - set(known))
    if unknown:
        raise CheckpointError(f"{chain[-1][0]}: has no tables {unknown}, only {known}")
    quantized = [table.key for table in manifest.tables if table.weight_dtype in BITS]
    if quantized:
        raise CheckpointError(
            f"{chain[-1][0]}: rows of {quantized} are quantized, for serving only: export the save that was quantized"
        )
    verify_files(chain)
    verify_tables(chain)
    output.mkdir(parents=True, exist_ok=True)
    written = []
    for key in known if tables is None else tables:
        saved = manifest.table(key)
        ids, files, rows, openers = _latest_rows(table_chain(chain, saved))
        target = output / f"{key}.{kind}"
        if target.exists():
            raise FileExistsError(f"{target} exists already")
        dtype = DTYPES[saved.weight_dtype]
        chunks = _read_weights(files, rows, openers)
        if kind == "npz":
            empty = torch.empty((0, saved.embedding_dim), dtype=dtype, device="cpu")
            weight = torch.cat([empty, *chunks])
            saved_weight = weight.float() if dtype is torch.bfloat16 else weight
            with open(target, "xb") as file:  # mode "x" also fails for a dangling link, for which `exists` is False
                np.savez(file, ids=ids, weight=saved_weight.numpy())
        else:
            count = len(ids)
            shape = (count, saved.embedding_dim)
            specs = [TensorSpec("ids", torch.int64, (count,)), TensorSpec("weight", dtype, shape)]
            with FileWriter(target) as out:
                writer = TensorWriter(out, TensorLayout(specs))
                writer.append("ids", torch.from_numpy(ids))
                for chunk in chunks:
                    writer.append("weight", chunk)
                writer.finish()
        written.append(target)
    return written
