"""One rank's files of a save."""

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
"""A file of rows, or a pack, has at most these."""
MAX_PACKED_BYTES = 64 << 20
"""A file in a pack has at most these. Anything larger takes so long that it may have a file of its own."""

CACHED_SPECS = (TensorSpec("ids", torch.int64, (0,)), TensorSpec("heats", torch.float16, (0,)))
"""Tensors of a file of rows that were in the cache, none yet: 10 bytes for each."""

Chunk = Mapping[str, torch.Tensor]
"""Rows of each tensor of a file, by name."""


def cached_rows_chunk(cached: CachedRows) -> Chunk:
    """The tensors of a file of rows that were in the cache: hottest first."""
    ids, heats = cached.by_heat()
    most = torch.finfo(torch.float16).max
    return {"ids": torch.from_numpy(ids), "heats": torch.from_numpy(heats.clip(0, most)).half()}


class RankFiles:
    """Files that a rank writes into the folder of a save. `finish` it, or `close` it where the save fails.

    Attributes:
        written: those that are complete, for the manifest.
    """

    def __init__(self, folder: Path, rank: int, save: str, packed: bool) -> None:
        """
        Args:
            folder: of the save.
            rank: of this process.
            save: the id of the save.
            packed: files of up to `MAX_PACKED_BYTES` share pack files, for saves of many tables.
        """
        self._folder, self._rank, self._save, self._packed = folder, rank, save, packed
        self._folders = {folder}
        self._pack: FileWriter | None = None
        self._packs = 0
        self.written: list[SavedFile] = []

    def finish(self) -> None:
        """Returns when all files are on the disk, with their names."""
        if self._pack is not None:
            self._pack.finish()
        for folder in sorted(self._folders, key=lambda each: -len(each.parts)):
            files.sync_folder(folder)

    def close(self) -> None:
        """Gives up what is open."""
        if self._pack is not None:
            self._pack.close()

    def _new_file(self, path: str) -> FileWriter:
        target = self._folder / path
        self._folders |= {above for above in target.parents if self._folder in above.parents}
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

    def rows(self, table: str, layer: int, specs: Sequence[TensorSpec], count: int, chunks: Iterable[Chunk]) -> None:
        """Writes `count` rows in files of at most `MAX_FILE_BYTES`; `specs` are of no rows, and no piece is empty."""
        most = max(1, MAX_FILE_BYTES // sum([spec.row_bytes for spec in specs]))
        following = iter(chunks)
        remainder: Chunk = {}
        for number, begin in enumerate(range(0, count, most)):
            name = f"layer-{layer}/rows-{number:05d}.safetensors"
            remainder = self._write(ROWS, table, layer, name, specs, min(most, count - begin), remainder, following)
        if remainder or next(following, None) is not None:
            raise ValueError(f"table {table!r}: more than its {count} rows")

    def removed(self, table: str, layer: int, ids: torch.Tensor) -> None:
        """Writes ids that have left the table, int64 `[n]`."""
        spec = TensorSpec("ids", torch.int64, (0,))
        name = f"layer-{layer}/removed.safetensors"
        self._write(REMOVED, table, layer, name, [spec], len(ids), {"ids": ids}, iter(()))

    def other(self, role: str, table: str, specs: Sequence[TensorSpec], count: int, chunks: Iterable[Chunk]) -> None:
        """Writes the file of a role that a table has once: a window, candidates."""
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
        """Writes `count` rows of `remainder` and then of `following`, and returns what is left of the last piece."""
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
    """The tensors of a file of so many rows. Many tables have the same."""
    return TensorLayout([TensorSpec(spec.name, spec.dtype, (count, *spec.shape[1:])) for spec in specs])


@lru_cache(64)
def row_specs(
    parts: Sequence[tuple[str, torch.dtype, int]], columns: Sequence[tuple[str, torch.dtype]]
) -> tuple[TensorSpec, ...]:
    """Tensors of a file of rows, none yet, those of wide elements first.

    Args:
        parts: names, data types and elements.
        columns: names and data types.
    """
    specs = [TensorSpec("ids", torch.int64, (0,))]
    specs += [TensorSpec(f"column.{name}", kind, (0,)) for name, kind in columns]
    for name, kind, elements in parts:
        specs.append(TensorSpec(name if name == "weight" else f"state.{name}", kind, (0, elements)))
    return tuple(sorted(specs, key=lambda spec: -spec.dtype.itemsize))
