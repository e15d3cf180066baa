"""Reproducible source distributions: sorted files without owners, all with the same modification time."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import time
from pathlib import Path

from setuptools.command.sdist import sdist


def write(folder: Path, archive: Path, moment: int) -> None:
    """Packs `folder` into the gzipped tar `archive`; `moment`, in Unix seconds, is every file's time."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            entry = tarfile.TarInfo(path.relative_to(folder.parent).as_posix())
            contents = path.read_bytes()
            entry.size, entry.mtime = len(contents), moment
            entry.mode = 0o755 if os.access(path, os.X_OK) else 0o644
            tar.addfile(entry, io.BytesIO(contents))
    with archive.open("wb") as file, gzip.GzipFile("", "wb", 9, file, moment) as zipped:
        zipped.write(packed.getvalue())


class SourceArchive(sdist):
    """The sdist command. The time of all files is SOURCE_DATE_EPOCH, or the current time if that is not set."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, owner=None, group=None):
        """Packs the archive. In the format gztar, which sdist uses here, the same files give the same bytes."""
        if format != "gztar":
            return super().make_archive(base_name, format, root_dir, base_dir, owner, group)
        archive = Path(f"{base_name}.tar.gz")
        archive.parent.mkdir(parents=True, exist_ok=True)
        write(Path(root_dir or ".") / str(base_dir), archive, int(os.environ.get("SOURCE_DATE_EPOCH", time.time())))
        return str(archive)
