"""Whole models end to end: samples per second, AUC and peak memory of ours and of rivals.

About half an hour, 8 GiB of memory, an idle core.

The models are those of examples/train_dlrm.py, on generated clicks with 26 tables of the sizes of the Criteo Kaggle
data (33.8 million rows), and of examples/train_sequence.py. A round trains every contender once, each in a process
of its own, in an order drawn anew. The time of forward, backward and update counts, for all but the first steps.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence

import torch

from .machine import with_malloc_settings
from .runner import Benchmark, Option, Row, say
from .whole_models import CONTENDERS, PROBLEMS, train_one

OURS = ("cached", "resident")


def _in_a_process(options: argparse.Namespace, model: str, batch_size: int, contender: str) -> Row | None:
    """The run of a contender in a process of its own, which says on stderr why there is none."""
    names = ("samples", "seed", "dim", "optimizer", "most_rows", "threads", "seconds")
    given = [text for name in names for text in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
    one = ["--one", model, str(batch_size), contender]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.end_to_end", *one, *given], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        say(f"{contender} took no part: exit status {done.returncode}")
        return None
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def summary(runs: Sequence[Row]) -> list[Row]:
    """For each contender the median of its rounds, and of the rounds' ratios of `cached` and `resident` to it."""
    of_contenders: dict[str, list[Row]] = {}
    for run in runs:
        of_contenders.setdefault(run["contender"], []).append(run)
    result = []
    for contender, rounds in of_contenders.items():
        line: Row = {"contender": contender}
        for name in ("samples_per_second", "auc", "table_bytes", "trained"):
            line[name] = statistics.median(run[name] for run in rounds)
        line["whole"] = all(run["whole"] for run in rounds)
        for ours in OURS:
            rates = {run["round"]: run["samples_per_second"] for run in of_contenders.get(ours, [])}
            shared = [rates[run["round"]] / run["samples_per_second"] for run in rounds if run["round"] in rates]
            line[f"{ours}_over"] = statistics.median(shared) if shared else None
        result.append(line)
    return sorted(result, key=lambda line: list(CONTENDERS).index(line["contender"]))


def measure(options: argparse.Namespace, model: str, batch_size: int) -> list[Row]:
    """All rounds of one model and batch size."""
    order, runs = random.Random(options.seed), []
    for number in range(options.rounds):
        for contender in order.sample(options.contenders, len(options.contenders)):
            run = _in_a_process(options, model, batch_size, contender)
            if run is not None:
                runs.append({"round": number, **run})
    return runs


def run(options: argparse.Namespace) -> Iterator[Row]:
    """The contenders of each model and batch size; a row says where one took no part in a round."""
    for model in options.models:
        for batch_size in options.batch_sizes:
            runs = measure(options, model, batch_size)
            table = f"{model}, batches of {batch_size}, {options.optimizer}"
            for line in summary(runs):
                yield {
                    "table": table,
                    **line,
                    "runs": [each for each in runs if each["contender"] == line["contender"]],
                }
            missing = options.rounds * len(options.contenders) - len(runs)
            if missing:
                yield {"table": "took no part", "model": model, "batch": batch_size, "runs": missing, "correct": False}


BENCHMARK = Benchmark(
    run,
    {
        "models": Option(list(PROBLEMS), choices=list(PROBLEMS)),
        "batch_sizes": Option([2048, 128], quick=[64]),
        "contenders": Option(list(CONTENDERS), choices=list(CONTENDERS)),
        "rounds": Option(3, quick=1),
        "samples": Option(400_000, "8 of 10 are trained, 1 is tested", quick=1_000),
        "seconds": Option(30.0, "no contender trains longer"),
        "most_rows": Option(2**40, "of a table; larger ones are cut to it", quick=2_000),
        "dim": Option(16),
        "optimizer": Option("adagrad", "of the tables", choices=("sgd", "adagrad")),
        "threads": Option(1, "of torch"),
        "seed": Option(0, kind=int),
    },
)


def main() -> None:
    """The command; `--one MODEL BATCH CONTENDER` before all options trains that contender in this process."""
    if sys.argv[1:2] != ["--one"]:
        BENCHMARK.start()
    model, batch_size, contender, *rest = sys.argv[2:]
    options = BENCHMARK.parse(rest)
    torch.set_num_threads(options.threads)
    print(json.dumps(train_one(options, model, int(batch_size), contender)))


if __name__ == "__main__":
    with_malloc_settings("benchmarks.end_to_end")
    main()
