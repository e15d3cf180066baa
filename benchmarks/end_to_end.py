"""Whole models end to end: samples per second, AUC and peak memory of ours and of rivals.

python -m benchmarks.end_to_end                      about half an hour, 8 GiB of memory, an idle core
python -m benchmarks.end_to_end --quick              tries the benchmark itself

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
from collections.abc import Sequence
from pathlib import Path

import torch

from .machine import describe, with_malloc_settings, write_json
from .whole_models import CONTENDERS, PROBLEMS, Run, train_one

OURS = ("cached", "resident")


def _in_a_process(options: argparse.Namespace, model: str, batch_size: int, contender: str) -> Run | None:
    """The run of a contender in a process of its own, which says on stderr why there is none."""
    names = ("samples", "seed", "dim", "optimizer", "most_rows", "threads", "seconds")
    given = [text for name in names for text in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
    one = ["--one", model, str(batch_size), contender]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.end_to_end", *given, *one], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        print(f"{contender} took no part: exit status {done.returncode}", file=sys.stderr)
        return None
    found: Run = json.loads(done.stdout.splitlines()[-1])
    return found


def summary(runs: Sequence[Run]) -> list[Run]:
    """For each contender the median of its rounds, and of the rounds' ratios of `cached` and `resident` to it."""
    of_contenders: dict[str, list[Run]] = {}
    for run in runs:
        of_contenders.setdefault(run["contender"], []).append(run)
    result = []
    for contender, rounds in of_contenders.items():
        line: Run = {"contender": contender}
        for name in ("samples_per_second", "auc", "table_bytes", "trained"):
            line[name] = statistics.median(run[name] for run in rounds)
        line["whole"] = all(run["whole"] for run in rounds)
        for ours in OURS:
            rates = {run["round"]: run["samples_per_second"] for run in of_contenders.get(ours, [])}
            shared = [rates[run["round"]] / run["samples_per_second"] for run in rounds if run["round"] in rates]
            line[f"{ours}_over"] = statistics.median(shared) if shared else None
        result.append(line)
    return sorted(result, key=lambda line: list(CONTENDERS).index(line["contender"]))


def table(lines: Sequence[Run]) -> str:
    """The lines in Markdown. The AUC of a run that was cut short says after how many samples it is."""
    rows = [
        "| tables | samples per second | cached is | resident is | test AUC | memory, MiB |",
        "|---|---|---|---|---|---|",
    ]
    for line in lines:
        auc = f"{line['auc']:.4f}" + ("" if line["whole"] else f" after {line['trained']:,.0f} samples")
        times = ["" if line[f"{ours}_over"] is None else f"{line[f'{ours}_over']:.2f}x" for ours in OURS]
        rate, memory = f"{line['samples_per_second']:,.0f}", f"{line['table_bytes'] / 2**20:,.0f}"
        rows.append(f"| {line['contender']} | {rate} | {times[0]} | {times[1]} | {auc} | {memory} |")
    return "\n".join(rows)


def measure(options: argparse.Namespace, model: str, batch_size: int) -> list[Run]:
    """All rounds of one model and batch size."""
    order, runs = random.Random(options.seed), []
    for number in range(options.rounds):
        for contender in order.sample(options.contenders, len(options.contenders)):
            run = _in_a_process(options, model, batch_size, contender)
            if run is not None:
                runs.append({"round": number, **run})
    return runs


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[2048, 128])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=400_000, help="8 of 10 are trained, 1 is tested")
    parser.add_argument("--seconds", type=float, default=30.0, help="no contender trains longer")
    parser.add_argument("--most-rows", type=int, default=2**40, help="of a table; larger ones are cut to it")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--optimizer", choices=["sgd", "adagrad"], default="adagrad", help="of the tables")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="1,000 samples, one batch size, one round, small tables")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "BATCH", "CONTENDER"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.quick:
        options.samples, options.batch_sizes, options.rounds, options.most_rows = 1_000, [64], 1, 2_000
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; the exit status is 1 where a contender took no part."""
    options = parsed(arguments)
    if options.one:
        model, batch_size, contender = options.one
        torch.set_num_threads(options.threads)
        print(json.dumps(train_one(options, model, int(batch_size), contender)))
        return 0
    missing, results = 0, []
    for model in options.models:
        for batch_size in options.batch_sizes:
            runs = measure(options, model, batch_size)
            missing += options.rounds * len(options.contenders) - len(runs)
            lines = summary(runs)
            print(f"\n{model}, batches of {batch_size}, {options.optimizer}\n\n{table(lines)}", flush=True)
            results.append({"model": model, "batch": batch_size, "summary": lines, "runs": runs})
    write_json(options.json, {"machine": describe(), "options": vars(options), "results": results})
    return int(missing > 0)


if __name__ == "__main__":
    with_malloc_settings("benchmarks.end_to_end")
    sys.exit(main())
