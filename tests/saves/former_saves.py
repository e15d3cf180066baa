"""Writes small saves of this version, which later versions must load.

python tests/saves/former_saves.py     writes the archives of models that are missing in tests/data/saves/<version>

Each model of `MODELS` has an archive of its saves, `<model>.zip`. The archive's `expected.json` has the rows, states,
pending gradients, counters and clocks at the last save. They were read from the tables, not from the save.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import tables
import test_saved_evicted as leaving
import torch
from tables import delta

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parent / "distributed")]  # for models of several ranks

import ranks  # noqa: E402
import sharded_model  # noqa: E402
import test_saved_lifecycle as lifecycle  # noqa: E402
import test_saves_any_world as any_world  # noqa: E402

import rec_sdk_torch as rst  # noqa: E402
from rec_sdk_torch.rules import Sketch  # noqa: E402
from rec_sdk_torch.saves.format import manifest  # noqa: E402

SAVES = HERE.parent / "data" / "saves"
EXPECTED = "expected.json"
SHARDED = sharded_model.Scenario(
    optimizer=rst.AccumulateAdagrad,
    options={"use_accumulate": True, "accumulate_step": 3},
    rules={"admit_threshold": 2, "evict_idle_steps": 3, "evict_step_interval": 2},
    sharding=("row_wise", "row_wise", "table_wise"),
    sizes=((1, 2),),
    steps=5,
)
"""Five steps with windows of three, so the second window is open at the end."""

SKETCH = next(place for place, each in enumerate(lifecycle.LIVES) if each.rule(Sketch))

Contents = Mapping[str, Any]


@dataclass(frozen=True)
class ArchivedModel:
    """A model whose saves are archived.

    Attributes:
        make: builds an untrained model.
        contents: returns everything that a load must restore.
        write: trains a model, saves it to a folder, and returns its `contents`.
        place: path in that folder from which the last save is loaded.
    """

    make: Callable[[], Any]
    contents: Callable[[Any], Contents]
    write: Callable[[Path], Contents]
    place: str = "."


def _series(model: Any, train: Callable[..., Any], ends: Sequence[int], *folders: Path) -> Iterator[Any]:
    """Trains a model up to each end, yields its table "a", then saves the model.

    Each save has its own folder of `folders`; the last folder is used for all remaining saves.
    """
    for place, (begin, end) in enumerate(pairwise((0, *ends))):
        train(model, range(begin, end))
        yield model.view("a")
        delta(model, folders[min(place, len(folders) - 1)])


def _write_chain(*folders: Path) -> Contents:
    """Writes a full save and two deltas, removing ids before each. The last save has pending gradients."""
    embedding = _window()
    for view in _series(embedding, tables.train, (4, 8, 13), *folders):
        view.remove(view.ids()[:3])
    return tables.contents(embedding)


def _folders(folder: Path) -> Contents:
    """Writes the chain of saves with the deltas in another folder than the full save."""
    return _write_chain(folder / "base", folder / "deltas")


def _packed(folder: Path) -> Contents:
    """Writes the chain of saves with packed files, which are normally used only for saves of many tables."""
    many, manifest.MANY_TABLES = manifest.MANY_TABLES, 1
    try:
        return _write_chain(folder)
    finally:
        manifest.MANY_TABLES = many


def _window() -> Any:
    return tables.make(tables.WINDOWS)


def _warm(folder: Path) -> Contents:
    """Writes one save that lists the cached rows."""
    embedding = tables.trained(6, tables.WINDOWS)
    delta(embedding, folder)
    return _cached(embedding)


def _cached(embedding: Any) -> Contents:
    with embedding.exclusive():
        ids = {each.name: sorted(embedding.view(each.name).cached().by_heat()[0].tolist()) for each in embedding.tables}
    return {"cached": ids, **tables.contents(embedding)}


def _lifecycle(folder: Path, of: int = 1) -> Contents:
    embedding = lifecycle.make(lifecycle.LIVES[of])
    for _ in _series(embedding, lifecycle.train, (5, 10), folder):
        pass
    return _with_lifecycle(embedding)


def _sketch(folder: Path) -> Contents:
    """Writes saves whose ids without a row are counted in a sketch."""
    return _lifecycle(folder, SKETCH)


def _with_lifecycle(embedding: Any) -> Contents:
    return {"lives": lifecycle.lifecycles(embedding), **tables.contents(embedding)}


def _evicted(folder: Path) -> Contents:
    """Writes saves of a table with evicted rows, some of which have already been taken."""
    embedding = leaving.make()
    for view in _series(embedding, leaving.train, (5, 10), folder):
        view.take_evicted(1)
    return _with_evicted(embedding)


def _with_evicted(embedding: Any) -> Contents:
    return {"evicted": leaving.untaken(embedding), **tables.contents(embedding)}


def _sharded(folder: Path) -> Contents:
    two = ranks.Ranks(2)
    held = any_world.joined(SHARDED, two.run(any_world.save, SHARDED, str(folder)))
    two.close()
    return held


MODELS = {
    "chain": ArchivedModel(_window, tables.contents, _write_chain),
    "packs": ArchivedModel(_window, tables.contents, _packed),
    "folders": ArchivedModel(_window, tables.contents, _folders, "deltas"),
    "warm": ArchivedModel(_window, _cached, _warm),
    "lifecycle": ArchivedModel(lambda: lifecycle.make(lifecycle.LIVES[1]), _with_lifecycle, _lifecycle),
    "sketch": ArchivedModel(lambda: lifecycle.make(lifecycle.LIVES[SKETCH]), _with_lifecycle, _sketch),
    "evicted": ArchivedModel(leaving.make, _with_evicted, _evicted),
    "sharded": ArchivedModel(lambda: sharded_model.Model(SHARDED, 3), any_world.owned_rows, _sharded),
}


def plain(contents: Any) -> Any:
    """Converts contents to the form that they have after a round trip through JSON."""
    if isinstance(contents, Mapping):
        return {str(name): plain(value) for name, value in contents.items()}
    if isinstance(contents, list | tuple):
        return [plain(value) for value in contents]
    return contents.hex() if isinstance(contents, bytes) else contents


def main() -> None:
    """Runs the command line."""
    torch.set_num_threads(1)
    version = SAVES / rst.__version__
    version.mkdir(exist_ok=True)
    for name, former in MODELS.items():
        if (version / f"{name}.zip").exists():
            continue
        with tempfile.TemporaryDirectory() as folder:
            expected = plain(former.write(Path(folder)))
            (Path(folder) / EXPECTED).write_text(json.dumps(expected))
            shutil.make_archive(str(version / name), "zip", folder)


if __name__ == "__main__":
    main()
