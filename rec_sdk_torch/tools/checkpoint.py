"""Looks into folders of saves: what is there, whether every byte is in order, and the tables as plain files.

A path is a save, or a folder of saves, of which the latest is taken with all that it follows. Nothing is changed; what
export and quantize write goes to another folder. docs/checkpoint.md says what a save has.
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
    """Prints every save in `path`, one folder or several, and the tables of the latest."""
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
    """Reads every file of the latest save in `path` and of those that it follows."""
    chain = chain_of(latest_save(path), to_paths(path))
    verify_files(chain)
    verify_tables(chain)
    for folder, manifest in chain:
        check_indexes(folder, manifest)
    files = sum(len(manifest.files) for _, manifest in chain)
    print(f"{chain[-1][0]}: in order, with {len(chain)} saves and {files} files")


def quantize(path: Paths, output: Path, bits: int) -> None:
    """Writes copies with rows of so many bits, and prints the error of each table."""
    done = quantize_save(path, output, bits)
    for folder in done.written:
        print(folder)
    if not done.written:
        print(f"{done.save} is there already")
        return
    for table in done.tables:
        print(
            f"  {table.key}: {table.rows} rows, {table.bytes} bytes, max abs error {table.max_error:.3g}, "
            f"relative error {table.relative_error:.3g}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; 1 where a save is missing or damaged."""
    examples = {line.split()[3]: line.partition(_PROGRAM)[2].strip() for line in _EXAMPLE.split("\n") if line}
    parser = CommandParser(prog=_PROGRAM, description=__doc__, example=_EXAMPLE)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (
        ("show", "what saves are there, and the tables of the latest"),
        ("verify", "reads every file of the latest save and of those that it follows"),
        ("export", "writes ids and weights of the tables, deltas applied, to one file for each"),
        ("quantize", "writes copies of the saves with rows of 8 or 4 bits, for serving; those that are missing"),
    ):
        command = commands.add_parser(name, help=text, description=text, example=f"{_PROGRAM} {examples[name]}")
        command.add_argument(
            "path", type=Path, nargs="+", help="a save, or a folder of saves, or several; the latest save is taken"
        )
        if name in ("export", "quantize"):
            command.add_argument("output", type=Path, help="a folder for the files, made when it is not there")
        if name == "quantize":
            command.add_argument("--bits", type=int, choices=list(NAMES), default=8)
        if name == "export":
            command.add_argument("--format", choices=["safetensors", "npz"], default="safetensors")
            command.add_argument("--table", action="append", help="its key, as show prints it; all by default")
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
