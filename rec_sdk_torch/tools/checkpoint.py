"""Inspects checkpoints: lists them, verifies every byte, exports tables to plain files, and quantizes copies.

A path is a checkpoint, or a folder of checkpoints, of which the latest is used with its chain. Checkpoints are never
changed; export and quantize write to another folder. docs/checkpoint.md describes what a checkpoint contains.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..runtime.command import CommandParser, complain
from ..saves.format.errors import CheckpointError
from ..saves.format.folders import Paths, chain_of, latest_save, saves_in, to_paths
from ..saves.format.index import check_indexes
from ..saves.format.manifest import read_manifest
from ..saves.format.quantized import NAMES
from ..saves.load.save_reader import verify_files, verify_tables
from ..saves.serve.export import export
from ..saves.serve.quantize import quantize_save

_PROGRAM = "python -m rec_sdk_torch.checkpoint"
_EXAMPLE = f"""
{_PROGRAM} show saves/
{_PROGRAM} verify saves/20260102030405
{_PROGRAM} export saves/ tables/ --format npz --table t_item
{_PROGRAM} quantize saves/ serving/ --bits 4
"""


def show(path: Paths) -> None:
    """Prints every save in one or several folders, and the tables of the latest save."""
    for folder in (save for each in to_paths(path) for save in saves_in(each)):
        manifest = read_manifest(folder)
        size = sum(file.bytes for file in manifest.files)
        after = f" number {manifest.sequence} after {manifest.base[:8]}" if manifest.sequence else ""
        after += f" with {', '.join(manifest.folders)}" if manifest.folders else ""
        print(f"{folder.name}  {manifest.kind}{after}  id {manifest.id[:8]}  {size} bytes  {manifest.world_size} ranks")
    manifest = read_manifest(latest_save(path))
    for table in manifest.tables:
        optimizer = "no optimizer"
        if table.optimizer is not None:
            saved = manifest.optimizers[table.optimizer]
            optimizer = f"{saved.class_name.rpartition('.')[2]}, step {saved.step}, lr {saved.options.get('lr')!r}"
        kind = "hash" if table.hashed else "index"
        print(f"  {table.key}: {kind} table, {table.rows} rows of {table.parts}, {table.weight_dtype}, {optimizer}")


def check(path: Paths) -> None:
    """Reads and checks every file of the latest save and its chain."""
    chain = chain_of(latest_save(path), to_paths(path))
    verify_files(chain)
    verify_tables(chain)
    for folder, manifest in chain:
        check_indexes(folder, manifest)
    files = sum(len(manifest.files) for _, manifest in chain)
    print(f"{chain[-1][0]}: in order, with {len(chain)} saves and {files} files")


def quantize(path: Paths, output: Path, bits: int) -> None:
    """Writes copies of the latest save and its chain with weights of 8 or 4 bits, and prints each table's error."""
    done = quantize_save(path, output, bits)
    for folder in done.written:
        print(folder)
    if not done.written:
        print(f"{done.save} exists already")
        return
    for table in done.tables:
        print(
            f"  {table.key}: {table.rows} rows, {table.bytes} bytes, max abs error {table.max_error:.3g}, "
            f"relative error {table.relative_error:.3g}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status: 1 if a save is missing or damaged."""
    examples = {line.split()[3]: line.partition(_PROGRAM)[2].strip() for line in _EXAMPLE.split("\n") if line}
    parser = CommandParser(prog=_PROGRAM, description=__doc__, example=_EXAMPLE)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (
        ("show", "lists the saves, and the tables of the latest one"),
        ("verify", "reads and checks every file of the latest save and its chain"),
        ("export", "writes the ids and weights of each table to a file, with deltas applied"),
        ("quantize", "writes copies of the saves with rows of 8 or 4 bits, for serving; existing copies are kept"),
    ):
        command = commands.add_parser(name, help=text, description=text, example=f"{_PROGRAM} {examples[name]}")
        command.add_argument(
            "path",
            type=Path,
            nargs="+",
            help="a save, or one or several folders of saves, of which the latest save is used",
        )
        if name in ("export", "quantize"):
            command.add_argument("output", type=Path, help="folder for the files; it is created if it does not exist")
        if name == "quantize":
            command.add_argument(
                "--bits", type=int, choices=list(NAMES), default=8, help="bits of a weight (default: %(default)s)"
            )
        if name == "export":
            command.add_argument(
                "--format", choices=["safetensors", "npz"], default="safetensors", help="default: %(default)s"
            )
            command.add_argument(
                "--table", action="append", help="key of a table, as show prints it; may be repeated; default: all"
            )
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "show":
            show(chosen.path)
        elif chosen.command == "verify":
            check(chosen.path)
        elif chosen.command == "quantize":
            quantize(chosen.path, chosen.output, chosen.bits)
        else:
            for file in export(chosen.path, chosen.output, chosen.format, chosen.table):
                print(file)
    except (CheckpointError, OSError) as error:
        complain(_PROGRAM, error)
        return 1
    return 0
