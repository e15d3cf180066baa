"""Writes copies of checkpoints, with weights of 8 or 4 bits, for serving."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from ..format import files
from ..format.errors import CheckpointError
from ..format.folders import UNFINISHED, PathLike, Paths, chain_of, latest_save, to_paths
from ..format.index import write_indexes
from ..format.manifest import MANIFEST, REMOVED, ROWS, WEIGHT, Manifest, SavedFile, SavedTable, read_manifest
from ..format.quantized import BITS, NAMES, dequantize, quantize, row_bytes
from ..format.tensors import TensorSpec
from ..format.validation import open_file
from ..load.save_reader import verify_files
from ..save.rank_writer import Chunk, RankFiles

_CHUNK_ROWS = 1 << 14
"""Number of rows in memory at a time."""


@dataclass
class QuantizedTableStats:
    """Statistics of the rows that a call of `quantize_save` wrote for one table.

    Attributes:
        key: key of the table.
        rows: number of written rows in all saves of the chain.
        bytes: size of the quantized weights of these rows, in bytes.
        max_error: largest absolute error of a weight.
        relative_error: 2-norm of all errors divided by the 2-norm of all weights; 0 if all weights are 0.
    """

    key: str
    rows: int = 0
    bytes: int = 0
    max_error: float = 0.0
    _squares: float = 0.0
    _error_squares: float = 0.0

    @property
    def relative_error(self) -> float:
        return math.sqrt(self._error_squares / self._squares) if self._squares else 0.0

    def add(self, weights: np.ndarray, packed: np.ndarray, bits: int) -> None:
        """Adds rows and their errors to the statistics."""
        exact = weights.astype(np.float64)
        errors = dequantize(packed, bits, weights.shape[1]) - exact
        self.rows += len(weights)
        self.bytes += packed.nbytes
        self.max_error = max(self.max_error, float(np.abs(errors).max(initial=0.0)))
        self._squares += float(np.square(exact).sum())
        self._error_squares += float(np.square(errors).sum())


@dataclass(frozen=True)
class QuantizedSave:
    """The result of `quantize_save`.

    Attributes:
        save: quantized copy of the latest save.
        written: copies that this call wrote, in the order of the chain.
        tables: statistics of the written rows.
    """

    save: Path
    written: list[Path]
    tables: list[QuantizedTableStats]


def quantize_save(path: Paths, out: PathLike, bits: int = 8) -> QuantizedSave:
    """Copies the latest save and its chain with weights of 8 or 4 bits.

    Copies have the kind (full or delta) and the name of the original saves, and a `TableReader` can open and follow
    them. Existing copies in `out` are kept, so that a call after each save writes only new copies. Optimizer states,
    accumulation buffers and candidates are left out.

    Args:
        path: a save, or one or several folders of saves, of which the latest save is copied.
        out: folder for the copies; it is created if it does not exist.
        bits: 8 or 4.

    Raises:
        ValueError: `bits` has another value.
        CheckpointError: a save is missing, damaged or already quantized; a weight is not finite; `out` has another save
            with the name of a copy; or another process is writing to `out`.
        OSError: the disk is full.

    Example:
        >>> import tempfile, torch
        >>> from rec_sdk_torch import Saver, TableBatchedEmbedding, TableConfig, TableOptimizer, export
        >>> sgd = TableOptimizer.create(torch.optim.SGD, {"lr": 0.1})
        >>> model = TableBatchedEmbedding([TableConfig("t", 100, 4)], optimizer=sgd, cache=10)
        >>> model(torch.tensor([7]), torch.tensor([0, 1])).sum().backward()
        >>> path = Saver().save(model, tempfile.mkdtemp())
        >>> done = export.quantize_save(path, tempfile.mkdtemp(), bits=8)
        >>> [table.key for table in done.tables]
        ['t']
    """
    if bits not in NAMES:
        raise ValueError(f"bits is {bits!r}, expected 8 or 4")
    out = Path(out)
    chain = chain_of(latest_save(path), to_paths(path))
    quantized_keys = [table.key for _, manifest in chain for table in manifest.tables if table.weight_dtype in BITS]
    if quantized_keys:
        raise CheckpointError(f"{chain[-1][0]}: tables {sorted(set(quantized_keys))} are quantized already")
    files.ensure_folder(out)
    tables = {table.key: QuantizedTableStats(table.key) for table in chain[-1][1].tables}
    written = []
    with files.folder_lock(out) as locked:
        if not locked:
            raise CheckpointError(f"{out}: another process or thread writes to it")
        for unfinished in out.glob(f"{UNFINISHED}*"):
            files.remove_tree(unfinished)
        for folder, manifest in chain:
            target = out / folder.resolve().name
            if not _has_copy(target, manifest, bits):
                verify_files([(folder, manifest)])
                _write_copy(folder, manifest, target, bits, tables)
                written.append(target)
    return QuantizedSave(target, written, list(tables.values()))


def _copy_id(save: str, bits: int) -> str:
    """Returns the id of a save's copy. It depends only on the save's id and the bits, so existing copies are found."""
    return hashlib.sha256(f"{save} {NAMES[bits]}".encode()).hexdigest()[:32]


def _has_copy(target: Path, manifest: Manifest, bits: int) -> bool:
    if not target.exists():
        return False
    if read_manifest(target).id != _copy_id(manifest.id, bits):
        raise CheckpointError(
            f"{target}: exists already, and is not a copy of {bits} bits of this save: use another folder"
        )
    return True


def _write_copy(
    folder: Path, manifest: Manifest, target: Path, bits: int, tables: dict[str, QuantizedTableStats]
) -> None:
    copy_id = _copy_id(manifest.id, bits)
    unfinished_copy = target.parent / f"{UNFINISHED}{copy_id}"
    files.create_folder(unfinished_copy)
    out = RankFiles(unfinished_copy, 0, copy_id, manifest.has_many_tables)
    try:
        for table in manifest.tables:
            statistics = tables.setdefault(table.key, QuantizedTableStats(table.key))
            for layer in sorted({file.layer for file in manifest.files_of(table.key, REMOVED, ROWS)}):
                _copy_layer(out, folder, manifest, table, layer, bits, statistics)
        out.finish()
        copied = replace(
            manifest,
            id=copy_id,
            base=_copy_id(manifest.base, bits),
            previous=None if manifest.previous is None else _copy_id(manifest.previous, bits),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            world_size=1,
            tables=[_quantized_table(table, bits) for table in manifest.tables],
            optimizers=[],
            windows={},
            files=out.written,
            folders=[],
        )
        write_indexes(unfinished_copy, copied)
        files.write_file(unfinished_copy / MANIFEST, copied.to_bytes())
        files.sync_folder(unfinished_copy)
        files.rename(unfinished_copy, target)
        files.sync_folder(target.parent)
    except BaseException:
        files.remove_tree(unfinished_copy)
        raise
    finally:
        out.close()


def _quantized_table(table: SavedTable, bits: int) -> SavedTable:
    parts = {WEIGHT: table.embedding_dim}
    return replace(
        table, weight_dtype=NAMES[bits], parts=parts, optimizer=None, columns={}, clocks={}, evicted_before=[]
    )


def _copy_layer(
    out: RankFiles,
    folder: Path,
    manifest: Manifest,
    table: SavedTable,
    layer: int,
    bits: int,
    statistics: QuantizedTableStats,
) -> None:
    """Copies the rows and removed ids of one layer of a table, and joins the files of all ranks to one rank's."""
    sources = [file for file in manifest.files_of(table.key, REMOVED, ROWS) if file.layer == layer]
    removed = [file for file in sources if file.role == REMOVED]
    if removed:
        out.write_removed(table.key, layer, torch.cat([_read_ids(folder, manifest, file) for file in removed]))
    rows = [file for file in sources if file.role == ROWS]
    specs = [
        TensorSpec("ids", torch.int64, (0,)),
        TensorSpec(WEIGHT, torch.uint8, (0, row_bytes(NAMES[bits], table.embedding_dim))),
    ]
    out.write_rows(
        table.key,
        layer,
        specs,
        sum(file.rows for file in rows),
        _quantized_chunks(folder, manifest, rows, bits, statistics),
    )


def _read_ids(folder: Path, manifest: Manifest, file: SavedFile) -> torch.Tensor:
    with open_file(folder, manifest, file) as reader:
        return reader.read("ids")


def _quantized_chunks(
    folder: Path, manifest: Manifest, rows: list[SavedFile], bits: int, statistics: QuantizedTableStats
) -> Iterator[Chunk]:
    for file in rows:
        with open_file(folder, manifest, file) as reader:
            for begin in range(0, file.rows, _CHUNK_ROWS):
                end = min(begin + _CHUNK_ROWS, file.rows)
                weights = reader.read(WEIGHT, begin, end).float().numpy()
                try:
                    packed = quantize(weights, bits)
                except ValueError as error:
                    raise CheckpointError(f"{reader.path}: rows {begin} to {end - 1}: {error}") from error
                statistics.add(weights, packed, bits)
                yield {"ids": reader.read("ids", begin, end), WEIGHT: torch.from_numpy(packed)}
