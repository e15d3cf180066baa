"""A job from its first step to a server: it trains, saves deltas, is killed, resumes with the same bits, and is served.

python examples/whole_job.py train job --steps 120 --kill-at 70    kills itself with SIGKILL after 70 steps
python examples/whole_job.py train job --steps 120 --plot job.png  resumes from its last version
python examples/whole_job.py serve job --until 240 &               serves new versions until that step
python examples/whole_job.py train job --steps 240                 trains more, and saves new versions

torchrun --nproc-per-node 2 examples/whole_job.py train job        on two ranks
python -m rec_sdk_torch.emulate examples/whole_job.py train job --device npu
"""

from __future__ import annotations

import support.environment  # noqa: F401  # first: what follows may be missing

# isort: split
import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, cast

import torch
from dlrm.model import DensePart
from dlrm.ranks import Ranks, divide, join
from dlrm.served import export_dense, request_of
from job.clicks import Clicks
from job.model import ClickModel, build_dense, build_tables, click_model
from job.scalars import Scalars, check_picture, summary_writer
from job.server import serve
from job.versions import (
    State,
    Version,
    VersionWriter,
    latest_name,
    program_path,
    read_version,
    tables_folder,
    versions_folder,
)
from sklearn.metrics import roc_auc_score
from support.clicks import ClickBatch
from support.errors import InputError, exit_code, write_problem
from support.options import Parser, add_click_options, positive_float, positive_int

from rec_sdk_torch import (
    CacheLog,
    CheckpointError,
    EmbCacheEmbeddingBagCollection,
    EmbCacheTrainPipelineSparseDist,
    Saver,
)

SAME = ("samples", "seed", "batch_size", "dim", "lr", "sparse_lr")
"""Options that must stay the same whenever a job resumes."""


def parse_options() -> argparse.Namespace:
    """Parses the command line."""
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="train | serve")
    _add_train(commands.add_parser("train", description=__doc__))
    server = commands.add_parser("serve", description=__doc__)
    server.add_argument("folder", type=Path, help="of the job")
    server.add_argument(
        "--until", type=positive_int, metavar="STEP", help="follow until that step (default: one version)"
    )
    server.add_argument(
        "--seconds", type=positive_float, default=60.0, help="to wait for a version (default %(default)g)"
    )
    return parser.parse_args()


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="of the job; it resumes from the latest version there")
    parser.add_argument(
        "--steps", type=positive_int, default=120, help="of the whole job, with its earlier steps (default 120)"
    )
    parser.add_argument("--save-every", type=positive_int, default=20, metavar="STEPS", help="default %(default)s")
    parser.add_argument(
        "--full-every",
        type=positive_int,
        default=4,
        metavar="SAVES",
        help="from one full save to the next; others are deltas (default %(default)s)",
    )
    parser.add_argument("--kill-at", type=positive_int, metavar="STEP", help="end with SIGKILL after that step")
    parser.add_argument("--device", choices=("cpu", "cuda", "npu"), default="cpu", help="default %(default)s")
    parser.add_argument("--depth", type=int, choices=range(13), default=2, help="batches ahead (default %(default)s)")
    add_click_options(parser, 20_000, "on all ranks together")
    parser.add_argument("--log-every", type=positive_int, default=10, metavar="STEPS", help="default %(default)s")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the curves of the caches; needs matplotlib")
    parser.add_argument("--tensorboard", type=Path, metavar="DIR", help="write these curves; needs tensorboard")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result for programs")


class Job:
    """A training job that can end at any moment and resume."""

    def __init__(self, options: argparse.Namespace, ranks: Ranks) -> None:
        """Builds the model, and loads its latest version if there is one. All ranks call this together."""
        self.options, self.ranks = options, ranks
        self.clicks = Clicks(options.samples, options.seed, options.batch_size)
        data, folder = self.clicks.data, options.folder
        dense = build_dense(data, options.dim, options.seed)
        ranks.on_rank_0_first(lambda: _make_folder(folder, dense, self.clicks))
        meta = None if ranks.hosts is None else torch.device("meta")  # each rank creates only its part of the rows
        tables = build_tables(
            data, options.dim, options.seed, options.cache, options.batch_size, options.sparse_lr, meta or ranks.device
        )
        self.model = divide(ClickModel(tables, dense.to(ranks.device)), list(data.features), ranks)
        inside = click_model(self.model)
        self.dense, self.tables = inside.dense, cast(EmbCacheEmbeddingBagCollection, inside.embeddings)
        self.optimizer = torch.optim.Adam(self.dense.parameters(), lr=options.lr)
        self.begin, points = 0, {}
        name = ranks.broadcast(latest_name(folder))
        if name is not None:
            version = read_version(folder, name)
            points = version.state["scalars"]
            self._resume(version)
        logs = ranks.rank == 0  # counters are per rank; only rank 0 logs them
        self.scalars = Scalars(self.begin, points, options.tensorboard if logs else None)
        self._log = CacheLog(self.scalars, inside, every=options.log_every) if logs else None

    def _resume(self, version: Version) -> None:
        state, given = version.state, self._settings()
        for option, value in state["settings"].items():
            if given[option] != value:
                name = "--" + option.replace("_", "-")
                raise InputError(f"{self.options.folder} is a job with {name} {value}, not {given[option]}")
        if self.options.kill_at is not None and self.options.kill_at <= state["step"]:
            raise InputError(f"--kill-at {self.options.kill_at}: the job goes on behind step {state['step']}")
        Saver().load(self.model, version.tables)  # the version's own save; a later save may have no complete version
        self.dense.load_state_dict(state["dense"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.begin = state["step"]
        self.say(f"goes on behind step {self.begin}, from {version.tables.name}")

    def train(self) -> None:
        """Trains up to the last step; writes a version every few steps and at the end."""
        options = self.options
        writer = VersionWriter(options.folder, self.ranks.rank)
        pipeline: EmbCacheTrainPipelineSparseDist[ClickBatch] = EmbCacheTrainPipelineSparseDist(
            self.model, self.optimizer, torch.device("cpu"), self.ranks.device, return_loss=True, depth=options.depth
        )
        batches = self.clicks.batches(self.begin, options.steps, self.ranks.rank, self.ranks.count)
        for step in range(self.begin + 1, options.steps + 1):
            _, loss = pipeline.progress(batches)
            if step % options.log_every == 0:
                self.say(f"step {step}: loss {loss.item():.4f}")
            writer.poll()
            if step % options.save_every == 0 or step == options.steps:
                number = (step - 1) // options.save_every
                writer.begin(self.model, self._state(step), incremental=number % options.full_every != 0)
            if step == options.kill_at:
                sys.stdout.flush()
                os.kill(os.getpid(), signal.SIGKILL)  # possibly in the middle of a save
        writer.finish()

    @torch.no_grad()
    def scores(self, batches: list[ClickBatch]) -> torch.Tensor:
        """Returns the probabilities of clicks, float32 [samples] on the CPU. All ranks call this for the same
        batches.
        """
        self.model.eval()
        scores = torch.cat([self.model(batch)[1].cpu() for batch in batches]).sigmoid()
        self.model.train()
        return scores

    def auc(self) -> float | None:
        """Returns the AUC on the test clicks, which are not trained on; None if they all have the same label."""
        test = self.clicks.test
        scores = self.scores(list(test.batches(self.options.batch_size)))
        return None if test.labels.unique().numel() < 2 else float(roc_auc_score(test.labels.numpy(), scores.numpy()))

    def _state(self, step: int) -> State:
        """Returns the current state of everything but the tables."""
        requests = self.clicks.requests()
        return {
            "step": step,  # the step also determines the next clicks
            "settings": self._settings(),
            "dense": _cpu_copy(self.dense.state_dict()),
            "optimizer": _cpu_copy(self.optimizer.state_dict()),
            "scalars": self.scalars.copy(),
            "requests": request_of(requests),
            "answers": self.scores([requests]),
        }

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self.options, name) for name in SAME}

    def say(self, text: str) -> None:
        """Prints the text once, on rank 0."""
        if self.ranks.rank == 0:
            print(text, flush=True)

    def close(self) -> None:
        """Closes the curves."""
        if self._log is not None:
            self._log.remove()
        self.scalars.close()


def _cpu_copy(value: Any) -> Any:
    """Returns a copy on the CPU, because the next step may change the original while the copy is being written."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _cpu_copy(each) for key, each in value.items()}
    return [_cpu_copy(each) for each in value] if isinstance(value, list) else value


def _make_folder(folder: Path, dense: DensePart, clicks: Clicks) -> None:
    """Creates the job's folders, and exports the dense part; once is enough, because versions contain its weights."""
    try:
        for each in (tables_folder(folder), versions_folder(folder)):
            each.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_problem(folder, error) from error
    if program_path(folder).exists():
        return
    unfinished = folder / ".unfinished.pt2"
    export_dense(dense, dense.dim, clicks.data, unfinished)
    unfinished.replace(program_path(folder))


def check(options: argparse.Namespace) -> None:
    """Refuses options that would otherwise fail only at the end, or on one rank while other ranks wait for it."""
    if options.kill_at is not None and options.kill_at > options.steps:
        raise InputError(f"--kill-at {options.kill_at} is behind the last of {options.steps} --steps")
    if options.plot is not None:
        check_picture(options.plot)
    if options.tensorboard is not None:
        summary_writer()
    if options.json is not None and (options.json.is_dir() or not options.json.parent.is_dir()):
        raise InputError(f"--json {options.json}: it is a folder, or its folder does not exist")


def train(options: argparse.Namespace) -> None:
    """Runs the command `train`."""
    check(options)
    torch.set_num_threads(1)
    ranks = join(options.device)
    if options.batch_size % ranks.count:
        raise InputError(f"--batch-size {options.batch_size} is not the same on each of {ranks.count} ranks")
    job = Job(options, ranks)
    if job.begin >= options.steps:
        job.say(f"step {job.begin} is saved: nothing to train up to --steps {options.steps}")
    job.train()
    auc = job.auc()
    job.close()
    if ranks.rank == 0:
        stats = job.tables.cache_stats()
        result = {"steps": max(options.steps, job.begin), "from": job.begin, "auc": auc, "cache": stats}
        job.say(f"test AUC {'n/a' if auc is None else f'{auc:.4f}'}")
        if options.json is not None:
            options.json.write_text(json.dumps(result | {"scalars": job.scalars.points}) + "\n")
        if options.plot is not None:
            job.scalars.draw(options.plot)
    ranks.leave()


def main() -> None:
    """Runs the script."""
    options = parse_options()
    try:
        if options.command == "train":
            train(options)
        else:
            torch.set_num_threads(1)
            serve(options.folder, options.until, options.seconds)
    except CheckpointError as error:
        raise InputError(str(error)) from error


if __name__ == "__main__":
    sys.exit(exit_code(main))
