"""Writes one rank's files into the folder of a save."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import torch

from ...tbe import CachedRows
from ..format import files
from ..format.file_writer import FileWriter
from ..format.manifest import REMOVED, ROWS, SavedFile
from ..format.tensors import TensorLayout, TensorSpec, TensorWriter

MAX_FILE_BYTES = 1 << 30
"""Largest size of a file of rows, and of a pack."""
MAX_PACKED_BYTES = 64 << 20
"""Largest size of a file in a pack. Opening a separate file for a larger one is quick compared with writing it."""

CACHED_SPECS = (TensorSpec("ids", torch.int64, (0,)), TensorSpec("heats", torch.float16, (0,)))
"""Specs of the tensors in the file that lists cached rows, with a row count of 0; a row takes 10 bytes."""

Chunk = Mapping[str, torch.Tensor]
"""Some rows of each tensor of a file, by tensor name."""


def cached_rows_chunk(cached: CachedRows) -> Chunk:
    """Returns the contents of the file that lists cached rows, hottest first: ids and heats (decayed use counts)."""
    ids, heats = cached.by_heat()
    max_heat = torch.finfo(torch.float16).max
    return {"ids": torch.from_numpy(ids), "heats": torch.from_numpy(heats.clip(0, max_heat)).half()}


class RankFiles:
    """Writer of one rank's files. The caller ends with `finish`, or with `close` if the save fails.

    Attributes:
        written: manifest entries of the complete files.
    """

    def __init__(self, folder: Path, rank: int, save: str, packed: bool) -> None:
        """Creates a writer for files in `folder`.

        Args:
            folder: folder of the save.
            rank: rank of this process.
            save: id of the save.
            packed: whether to put files of up to `MAX_PACKED_BYTES` into pack files, as in saves of many tables.
        """
        self._folder, self._rank, self._save, self._packed = folder, rank, save, packed
        self._folders = {folder}
        self._pack: FileWriter | None = None
        self._packs = 0
        self.written: list[SavedFile] = []

    def finish(self) -> None:
        """Blocks until all files and the folder entries that name them are on disk."""
        if self._pack is not None:
            self._pack.finish()
        for folder in sorted(self._folders, key=lambda each: -len(each.parts)):
            files.sync_folder(folder)

    def close(self) -> None:
        """Closes the open pack, if there is one."""
        if self._pack is not None:
            self._pack.close()

    def _new_file(self, path: str) -> FileWriter:
        target = self._folder / path
        self._folders |= {parent for parent in target.parents if self._folder in parent.parents}
        files.ensure_folder(target.parent, sync=False)
        return FileWriter(target)

    def _pack_for(self, size: int) -> FileWriter:
        if self._pack is not None and self._pack.end + size > MAX_FILE_BYTES:
            self._pack.finish()
            self._pack = None
        if self._pack is None:
            self._pack = FileWriter(self._folder / f"pack-{self._rank:05d}-{self._packs:05d}")
            self._packs += 1
        return self._pack

    def write_rows(
        self, table: str, layer: int, specs: Sequence[TensorSpec], count: int, chunks: Iterable[Chunk]
    ) -> None:
        """Writes rows of a table, in files of at most `MAX_FILE_BYTES`.

        Args:
            table: key of the table.
            layer: number of the layer that the rows belong to.
            specs: specs of the file's tensors, with a row count of 0.
            count: number of rows to write.
            chunks: the rows, in non-empty chunks.

        Raises:
            ValueError: the chunks have more or fewer rows than `count`.
        """
        max_rows = max(1, MAX_FILE_BYTES // sum([spec.row_bytes for spec in specs]))
        following = iter(chunks)
        remainder: Chunk = {}
        for number, begin in enumerate(range(0, count, max_rows)):
            name = f"layer-{layer}/rows-{number:05d}.safetensors"
            remainder = self._write(ROWS, table, layer, name, specs, min(max_rows, count - begin), remainder, following)
        if remainder or next(following, None) is not None:
            raise ValueError(f"table {table!r}: more than its {count} rows")

    def write_removed(self, table: str, layer: int, ids: torch.Tensor) -> None:
        """Writes the ids, int64 `[n]`, that were removed from a table since the previous save."""
        spec = TensorSpec("ids", torch.int64, (0,))
        name = f"layer-{layer}/removed.safetensors"
        self._write(REMOVED, table, layer, name, [spec], len(ids), {"ids": ids}, iter(()))

    def write_role_file(
        self, role: str, table: str, specs: Sequence[TensorSpec], count: int, chunks: Iterable[Chunk]
    ) -> None:
        """Writes a file that a table has once per rank, such as `window` or `candidates`, which are role and name."""
        self._write(role, table, 0, f"{role}.safetensors", specs, count, {}, iter(chunks))

    def _write(
        self,
        role: str,
        table: str,
        layer: int,
        name: str,
        specs: Sequence[TensorSpec],
        count: int,
        remainder: Chunk,
        following: Iterator[Chunk],
    ) -> Chunk:
        """Writes a file of `count` rows from `remainder`, then from `following`; returns the rest of the last chunk."""
        layout = _layout(tuple(specs), count)
        path = f"{table}/rank-{self._rank:05d}/{name}"
        packed = self._packed and layout.bytes <= MAX_PACKED_BYTES
        with contextlib.nullcontext(self._pack_for(layout.bytes)) if packed else self._new_file(path) as out:
            writer = TensorWriter(out, layout, {"save": self._save, "table": table})
            missing = count
            while missing:
                chunk = remainder or next(following, {})
                if not chunk:
                    raise ValueError(f"{out.path}: {missing} of {count} rows of table {table!r} are missing")
                taken = len(chunk["ids"])
                remainder = {}
                if taken > missing:
                    taken, remainder = missing, {key: values[missing:] for key, values in chunk.items()}
                    chunk = {key: values[:missing] for key, values in chunk.items()}
                for spec in specs:
                    writer.append(spec.name, chunk[spec.name])
                missing -= taken
            checksums = writer.finish()
        path, offset = (out.path.name, writer.begin) if packed else (path, None)
        self.written.append(SavedFile(path, role, table, self._rank, layer, count, writer.bytes, checksums, offset))
        return remainder


@lru_cache(64)
def _layout(specs: tuple[TensorSpec, ...], count: int) -> TensorLayout:
    """Returns the layout of a file of `count` rows. Layouts are cached, because many tables have the same layout."""
    return TensorLayout([TensorSpec(spec.name, spec.dtype, (count, *spec.shape[1:])) for spec in specs])


@lru_cache(64)
def row_specs(
    parts: Sequence[tuple[str, torch.dtype, int]], columns: Sequence[tuple[str, torch.dtype]]
) -> tuple[TensorSpec, ...]:
    """Returns the specs of a file of rows, with a row count of 0; wide data types come first, so all are aligned.

    Args:
        parts: name, data type and number of elements of each part.
        columns: name and data type of each column.
    """
    specs = [TensorSpec("ids", torch.int64, (0,))]
    specs += [TensorSpec(f"column.{name}", kind, (0,)) for name, kind in columns]
    for name, kind, elements in parts:
        specs.append(TensorSpec(name if name == "weight" else f"state.{name}", kind, (0, elements)))
    return tuple(sorted(specs, key=lambda spec: -spec.dtype.itemsize))
