"""One rank's files of a save."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from . import files
from .manifest import REMOVED, ROWS, SavedFile
from .tensors import TensorSpec, TensorWriter

MOST_BYTES = 1 << 30
"""Of a file of rows."""

Piece = Mapping[str, torch.Tensor]
"""Rows of each tensor of a file, by name."""


class RankFiles:
    """Files that a rank writes into the folder of a save.

    Attributes:
        written: those that are complete, for the manifest.
    """

    def __init__(self, folder: Path, rank: int, save: str) -> None:
        """`save`: its id."""
        self._folder, self._rank, self._save = folder, rank, save
        self.written: list[SavedFile] = []

    def rows(self, table: str, layer: int, specs: Sequence[TensorSpec], count: int, pieces: Iterable[Piece]) -> None:
        """Writes `count` rows in files of at most `MOST_BYTES`; `specs` are of no rows."""
        most = max(1, MOST_BYTES // sum(TensorSpec(s.name, s.dtype, (1, *s.shape[1:])).bytes for s in specs))
        rest = (piece for piece in pieces if len(piece["ids"]))
        left: Piece = {}
        for number, begin in enumerate(range(0, count, most)):
            name = f"layer-{layer}/rows-{number:05d}.safetensors"
            left = self._write(ROWS, table, layer, name, specs, min(most, count - begin), left, rest)
        if left or next(rest, None) is not None:
            raise ValueError(f"table {table!r}: more than its {count} rows")

    def removed(self, table: str, layer: int, ids: torch.Tensor) -> None:
        """Writes ids that have left the table, int64 `[n]`."""
        spec = TensorSpec("ids", torch.int64, (0,))
        name = f"layer-{layer}/removed.safetensors"
        self._write(REMOVED, table, layer, name, [spec], len(ids), {"ids": ids}, iter(()))

    def other(self, role: str, table: str, specs: Sequence[TensorSpec], count: int, pieces: Iterable[Piece]) -> None:
        """Writes the file of a role that a table has once: a window, candidates."""
        self._write(role, table, 0, f"{role}.safetensors", specs, count, {}, iter(pieces))

    def _write(
        self,
        role: str,
        table: str,
        layer: int,
        name: str,
        specs: Sequence[TensorSpec],
        count: int,
        left: Piece,
        rest: Iterator[Piece],
    ) -> Piece:
        """Writes `count` rows of `left` and then of `rest`; what is left of the last piece."""
        path = f"{table}/rank-{self._rank:05d}/{name}"
        target = self._folder / path
        files.make_folder(target.parent)
        full = [TensorSpec(spec.name, spec.dtype, (count, *spec.shape[1:])) for spec in specs]
        writer = TensorWriter(target, full, {"save": self._save, "table": table})
        try:
            missing = count
            while missing:
                piece = left or next(rest, {})
                if not piece:
                    raise ValueError(f"{target}: {missing} of {count} rows are missing")
                taken = min(missing, len(piece["ids"]))
                for spec in specs:
                    writer.append(spec.name, piece[spec.name][:taken])
                left = {key: values[taken:] for key, values in piece.items()} if taken < len(piece["ids"]) else {}
                missing -= taken
            size, checksums = writer.finish()
        finally:
            writer.close()
        self.written.append(SavedFile(path, role, table, self._rank, layer, count, size, checksums))
        return left


def row_specs(
    parts: Mapping[str, int], dtypes: Mapping[str, torch.dtype], columns: Mapping[str, torch.dtype]
) -> list[TensorSpec]:
    """Tensors of a file of rows, none yet, those of wide elements first."""
    specs = [TensorSpec("ids", torch.int64, (0,))]
    specs += [TensorSpec(f"column.{name}", kind, (0,)) for name, kind in columns.items()]
    for name, elements in parts.items():
        named = name if name == "weight" else f"state.{name}"
        specs.append(TensorSpec(named, dtypes[name], (0, elements)))
    return sorted(specs, key=lambda spec: -spec.dtype.itemsize)


def window_specs(dim: int) -> list[TensorSpec]:
    """Tensors of a file of pending gradients."""
    return [TensorSpec("ids", torch.int64, (0,)), TensorSpec("sums", torch.float32, (0, 2 * dim))]
