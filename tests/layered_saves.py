"""Writes a chain of saves as one full save of several layers, which the format of saves allows."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path

from rec_sdk_torch.saves.format.folders import chain_of, latest_save
from rec_sdk_torch.saves.format.index import write_indexes
from rec_sdk_torch.saves.format.manifest import FULL, MANIFEST, REMOVED, ROWS
from rec_sdk_torch.saves.format.validation import open_file
from rec_sdk_torch.saves.save.rank_writer import RankFiles


def write_layered(saves: Path, target: Path, *, packed: bool) -> Path:
    """Writes the latest chain in `saves` as one full save in `target`, with a layer for each save of the chain.

    Args:
        packed: whether all files are in one pack.
    """
    chain = chain_of(latest_save(saves))
    folder = target / "20260102030405"
    folder.mkdir(parents=True)
    last, save = chain[-1][1], uuid.uuid4().hex
    out = RankFiles(folder, 0, save, packed)
    for table in last.tables:
        for layer, (source, manifest) in enumerate(chain):
            for file in manifest.files_of(table.key, REMOVED, ROWS):
                with open_file(source, manifest, file) as reader:
                    specs = [replace(spec, shape=(0, *spec.shape[1:])) for spec in reader.specs.values()]
                    tensors = {name: reader.read(name) for name in reader.specs}
                if file.role == REMOVED:
                    out.write_removed(table.key, layer, tensors["ids"])
                else:
                    out.write_rows(table.key, layer, specs, file.rows, iter([tensors]))
    out.finish()
    written = replace(last, id=save, base=save, previous=None, kind=FULL, sequence=0, files=out.written)
    write_indexes(folder, written)
    (folder / MANIFEST).write_bytes(written.to_bytes())
    return folder
