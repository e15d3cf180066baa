"""The life of a model of many small tables beside TorchRec's EmbeddingBagCollection of the same tables.

python -m benchmarks.many_tables                               1,000 tables of 1,000 rows, D = 64
python -m benchmarks.many_tables --tables 20 --rows 50         tries the benchmark itself

Seconds of the processor, the least of some rounds, in which both take turns: making the model, its first step and
later ones, a save and a load of all rows; and the bytes that the model takes. TorchRec's tables are saved by
`torch.save` of their state dict, and loaded by `torch.load` and `load_state_dict`.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import rec_sdk_torch as rst

from .machine import describe, with_malloc_settings, write_json
from .timing import no_collection

TARGETS = {"save": 1.5, "load": 1.5}
"""Processor time over TorchRec's, at most."""
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


def settings(options: argparse.Namespace, table: int) -> dict[str, Any]:
    """The fields of a table's config, ours and theirs."""
    return {
        "name": f"t{table}",
        "feature_names": [f"f{table}"],
        "num_embeddings": options.rows,
        "embedding_dim": options.dim,
    }


class Ours:
    """An `EmbCacheEmbeddingBagCollection` of hash tables, all of whose rows fit its cache."""

    def __init__(self, options: argparse.Namespace) -> None:
        configs = [rst.EmbCacheEmbeddingBagConfig(**settings(options, table)) for table in range(options.tables)]
        self.tables = rst.EmbCacheEmbeddingBagCollection(tables=configs, cache=1.0, seed=0)
        rst.apply_optimizer_in_backward(torch.optim.SGD, self.tables.parameters(), {"lr": 0.1})
        self._saver = rst.Saver()

    def save(self, path: Path) -> None:
        self._saver.save(self.tables, path)

    def load(self, path: Path) -> None:
        self._saver.load(self.tables, path)


class Theirs:
    """TorchRec's collection, whose tables are modules of torch."""

    def __init__(self, options: argparse.Namespace) -> None:
        configs = [EmbeddingBagConfig(**settings(options, table)) for table in range(options.tables)]
        self.tables = EmbeddingBagCollection(tables=configs, device=torch.device("cpu"))
        apply_optimizer_in_backward(torch.optim.SGD, self.tables.parameters(), {"lr": 0.1})

    def save(self, path: Path) -> None:
        path.mkdir()
        torch.save(self.tables.state_dict(), path / "tables")

    def load(self, path: Path) -> None:
        self.tables.load_state_dict(torch.load(path / "tables"))


def step(model: Any, batch: KeyedJaggedTensor) -> None:
    out = model.tables(batch).values()
    out.backward(torch.ones_like(out))


def resident_bytes() -> int:
    """Memory of the process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/status has no VmRSS")


def cpu_seconds(call: Callable[[], object]) -> float:
    """Seconds of the processor for all threads of this process."""
    with no_collection():
        begin = time.process_time()
        call()
        return time.process_time() - begin


def live(kind: type[Any], options: argparse.Namespace, found: Phases) -> Any:
    """A new model that has met every id; what that took is added to `found`."""
    made: list[Any] = []
    gc.collect()
    before = resident_bytes()
    found.setdefault("construct", []).append(cpu_seconds(lambda: made.append(kind(options))))
    found.setdefault("first step", []).append(cpu_seconds(lambda: step(made[0], batch_of(options, None))))
    gc.collect()
    found.setdefault("bytes", []).append(resident_bytes() - before)
    return made[0]


def run(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    """The least of all rounds for each phase, ours and theirs, and their ratio.

    Raises:
        AssertionError: loaded rows are others than those that were saved.
    """
    found: dict[str, Phases] = {"ours": {}, "torchrec": {}}
    models = {"ours": live(Ours, options, found["ours"]), "torchrec": live(Theirs, options, found["torchrec"])}
    for number in range(options.rounds):
        batch, path = batch_of(options, number), folder / str(number)
        for name, model in models.items():
            phases, own = found[name], path.with_suffix(f".{name}")
            for _ in range(options.steps):
                phases.setdefault("step", []).append(cpu_seconds(partial(step, model, batch)))
            before = weights(model, batch)
            phases.setdefault("save", []).append(cpu_seconds(partial(model.save, own)))
            step(model, batch)
            phases.setdefault("load", []).append(cpu_seconds(partial(model.load, own)))
            assert torch.equal(weights(model, batch), before), f"{name}: loaded rows are others"
            shutil.rmtree(own)
    least = {name: {phase: min(values) for phase, values in phases.items()} for name, phases in found.items()}
    ours, theirs = least["ours"], least["torchrec"]
    ratios = {phase: ours[phase] / theirs[phase] if theirs[phase] else float("nan") for phase in ours}
    return {**least, "ours_to_torchrec": ratios}


def weights(model: Any, batch: KeyedJaggedTensor) -> torch.Tensor:
    with torch.no_grad():
        values: torch.Tensor = model.tables.eval()(batch).values().clone()
    model.tables.train()
    return values


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--lookups", type=int, default=16, help="of each table in a step")
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk for saves; a temporary one")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = run(options, Path(folder))
    print(f"{'':12}{'ours':>14}{'TorchRec':>14}{'ratio':>8}{'target':>8}")
    for phase, ours in found["ours"].items():
        shown = [
            f"{value / 2**20:.0f} MiB" if phase == "bytes" else f"{1e3 * value:.1f} ms"
            for value in (ours, found["torchrec"][phase])
        ]
        ratio, target = found["ours_to_torchrec"][phase], TARGETS.get(phase)
        print(f"{phase:12}{shown[0]:>14}{shown[1]:>14}{ratio:8.2f}{'' if target is None else f'{target:8.1f}'}")
    write_json(options.json, {"machine": describe(), "options": vars(options), "phases": found})
    return 0


if __name__ == "__main__":
    with_malloc_settings("benchmarks.many_tables")
    torch.set_num_threads(1)
    sys.exit(main())
