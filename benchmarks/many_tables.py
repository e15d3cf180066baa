"""The life of a model of many small tables beside TorchRec's EmbeddingBagCollection of the same tables.

Seconds of the processor, the least of some rounds, in which both take turns: making the model, its first step and
later ones, a save and a load of all rows; and the bytes that the model takes. TorchRec's tables are saved by
`torch.save` of their state dict, and loaded by `torch.load` and `load_state_dict`.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torchrec import KeyedJaggedTensor

import rec_sdk_torch as rst

from .machine import resident_memory
from .runner import Benchmark, Option, Row, Target
from .tables import configs, make_collection
from .timing import no_collection, seconds_of

Phases = dict[str, list[float]]


def batch_of(options: argparse.Namespace, seed: int | None) -> KeyedJaggedTensor:
    """`lookups` ids of each table, one a sample; None: every id once."""
    names = [f"f{table}" for table in range(options.tables)]
    if seed is None:
        ids = torch.arange(options.rows).repeat(options.tables)
    else:
        random = torch.Generator().manual_seed(seed)
        ids = torch.randint(options.rows, (options.tables * options.lookups,), generator=random)
    return KeyedJaggedTensor(names, ids, lengths=torch.ones_like(ids))


class Model:
    """A collection with SGD, its save and its load."""

    prefix, settings = "", dict[str, Any](device="cpu")

    def __init__(self, options: argparse.Namespace) -> None:
        tables = configs([(options.rows, options.dim)] * options.tables)
        self.tables = make_collection(tables, torch.optim.SGD, {"lr": 0.1}, True, self.prefix, **self.settings)

    def step(self, batch: KeyedJaggedTensor) -> None:
        out = self.tables(batch).values()
        out.backward(torch.ones_like(out))

    def weights(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        with torch.no_grad():
            values: torch.Tensor = self.tables.eval()(batch).values().clone()
        self.tables.train()
        return values

    def save(self, path: Path) -> None:
        path.mkdir()
        torch.save(self.tables.state_dict(), path / "tables")

    def load(self, path: Path) -> None:
        self.tables.load_state_dict(torch.load(path / "tables"))


class Ours(Model):
    """Hash tables, all of whose rows fit their cache."""

    prefix, settings = "EmbCache", dict[str, Any](cache=1.0, seed=0)

    def save(self, path: Path) -> None:
        rst.Saver().save(self.tables, path)

    def load(self, path: Path) -> None:
        rst.Saver().load(self.tables, path)


def cpu_seconds(call: Callable[[], object]) -> float:
    """Seconds of the processor for all threads of this process."""
    with no_collection():
        return seconds_of(call, time.process_time)


def live(kind: type[Model], options: argparse.Namespace, found: Phases) -> Model:
    """A new model that has met every id; what that took is added to `found`."""
    made: list[Model] = []
    gc.collect()
    before = resident_memory()
    found["construct"] = [cpu_seconds(lambda: made.append(kind(options)))]
    found["first step"] = [cpu_seconds(lambda: made[0].step(batch_of(options, None)))]
    gc.collect()
    found["bytes"] = [resident_memory() - before]
    return made[0]


def run_round(model: Model, batch: KeyedJaggedTensor, path: Path, steps: int, found: Phases) -> None:
    """Some steps, a save, a step more and a load; AssertionError when rows are not those that were saved."""
    times: list[tuple[str, Any]] = [("step", partial(model.step, batch))] * steps
    times += [("save", partial(model.save, path)), ("step", partial(model.step, batch))]
    times += [("load", partial(model.load, path))]
    for phase, call in times:
        if phase == "save":
            before = model.weights(batch)
        found.setdefault(phase, []).append(cpu_seconds(call))
    assert torch.equal(model.weights(batch), before), f"{type(model).__name__}: loaded rows are others"
    shutil.rmtree(path)


def run(options: argparse.Namespace) -> Iterator[Row]:
    """The least of all rounds for each phase, ours and theirs, and their ratio."""
    found: dict[str, Phases] = {"ours": {}, "torchrec": {}}
    models = {name: live(kind, options, found[name]) for name, kind in (("ours", Ours), ("torchrec", Model))}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for number in range(options.rounds):
            for name, model in models.items():
                path = Path(folder) / f"{number}.{name}"
                run_round(model, batch_of(options, number), path, options.steps, found[name])
    for phase in found["ours"]:
        ours, theirs = (min(phases[phase]) for phases in found.values())
        unit, factor = ("MiB", 2**-20) if phase == "bytes" else ("ms", 1e3)
        ratio = ours / theirs if theirs else None
        yield {"phase": phase, "ours": ours * factor, "torchrec": theirs * factor, "unit": unit, "ratio": ratio}


BENCHMARK = Benchmark(
    run,
    {
        "tables": Option(1000, quick=20),
        "rows": Option(1000, quick=50),
        "dim": Option(64, quick=8),
        "lookups": Option(16, "of each table in a step"),
        "steps": Option(10, "of a round", quick=2),
        "rounds": Option(5, quick=2),
        "folder": Option(help="on the disk for saves"),
    },
    [
        Target(f"{phase}, processor time over TorchRec's", "ratio", {"phase": phase}, worst=1.5)
        for phase in ("save", "load")
    ],
)

if __name__ == "__main__":
    BENCHMARK.start()
