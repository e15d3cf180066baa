"""Training and evaluation of a click model with any kind of tables."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch
import torch.distributed as dist
from sklearn.metrics import log_loss, roc_auc_score
from torch import Tensor, nn
from torchrec.optim.keyed import KeyedOptimizer
from tqdm import tqdm

from support.clicks import ClickBatch, ClickData, Split

CacheStats = dict[str, int]
POINTS = 100  # number of points of the loss and hit-rate curves
EVALUATIONS = 6  # number of points of the validation curve
BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps [{elapsed}<{remaining}{postfix}]"


@dataclass(frozen=True)
class Schedule:
    """The length of a training run, and the order of its samples."""

    batch_size: int
    epochs: int
    max_steps: int | None
    seed: int
    rank: int = 0
    ranks: int = 1

    @property
    def global_batch(self) -> int:
        """Number of samples of a step on all ranks together."""
        return self.batch_size * self.ranks

    def steps(self, samples: int) -> int:
        """Returns the number of batches in a log of `samples` samples."""
        whole, rest = divmod(samples, self.global_batch)
        all_epochs = self.epochs * (whole + (rest >= self.ranks))
        return all_epochs if self.max_steps is None else min(self.max_steps, all_epochs)

    def batches(self, data: ClickData) -> Iterator[ClickBatch]:
        """Yields this rank's part of the batches of all epochs. Each epoch has a random order, which the seed
        determines.

        All ranks together take the samples that a single process with the global batch size would take. A last batch
        with fewer samples than ranks is left out.
        """
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.epochs):
            order = torch.randperm(len(data), generator=generator)
            for samples in torch.split(order, self.global_batch):
                if len(samples) >= self.ranks:
                    yield data.select(torch.tensor_split(samples, self.ranks)[self.rank]).batch()


@dataclass(frozen=True)
class Job:
    """Everything that compared models have in common."""

    data: ClickData
    split: Split
    schedule: Schedule


@dataclass(frozen=True)
class Quality:
    """The quality of a model's predictions; None if all labels are the same, so that nothing can be ranked."""

    auc: float | None
    log_loss: float | None


@dataclass
class Curves:
    """The curves of a training run, for the plot."""

    steps: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    hit_rate: list[float] = field(default_factory=list)  # empty if the tables have no cache
    evaluation_steps: list[int] = field(default_factory=list)
    validation_auc: list[float | None] = field(default_factory=list)


@dataclass(frozen=True)
class TrainResult:
    """The results of a finished training run."""

    test: Quality
    steps: int
    seconds: float  # time from the first step to the last, with batches, steps and evaluations
    training_seconds: float  # time of the steps alone
    samples_per_second: float
    curves: Curves
    cache: CacheStats | None


def hit_rate(now: CacheStats, before: CacheStats | None = None) -> float:
    """Returns the fraction of the batches' distinct rows that were already in the device cache."""
    before = before or {}
    rows = now["unique_rows"] - before.get("unique_rows", 0)
    misses = now["unique_misses"] - before.get("unique_misses", 0)
    return 1.0 - misses / rows if rows else 0.0


def evaluate(model: nn.Module, data: ClickData, batch_size: int) -> Quality:
    """Returns AUC and log loss of a model on a log. Tables are only read: no id is inserted, no row swapped in."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        scores = torch.cat([model(batch) for batch in data.batches(batch_size)]).sigmoid()
    model.train(was_training)
    if torch.unique(data.labels).numel() < 2:
        return Quality(None, None)
    labels, clicks = data.labels.numpy(), scores.double().numpy()
    return Quality(float(roc_auc_score(labels, clicks)), float(log_loss(labels, clicks)))


def train_step(model: nn.Module, optimizer: KeyedOptimizer, batch: ClickBatch) -> Tensor:
    """Runs one step. Tables with an optimizer in their backward pass are updated when backward() returns."""
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def _mean_over_ranks(value: Tensor) -> Tensor:
    """Returns the mean over all ranks, which must all call this."""
    if dist.is_initialized():
        dist.all_reduce(value)
        value = value / dist.get_world_size()
    return value


class Monitor:
    """A recorder of the curves that also shows the progress: in a bar or, without a terminal, in a few lines."""

    def __init__(
        self,
        bar: tqdm[ClickBatch],
        name: str,
        steps: int,
        cache_stats: Callable[[], CacheStats] | None,
        quiet: bool = False,
    ) -> None:
        self.curves = Curves()
        self.seconds = 0.0
        self.samples = 0
        self._bar = bar
        self._name = name
        self._steps = steps
        self._quiet = quiet
        self._shown: dict[str, str] = {}
        self._every = max(1, steps // POINTS)
        self._cache_stats = cache_stats
        self._last_stats: CacheStats = {}  # the tables are empty when training starts
        self._losses: list[Tensor] = []

    def record(self, step: int, loss: Tensor, samples: int, seconds: float) -> None:
        """Records the results of a step; every few steps they become a point of the curves."""
        self._losses.append(loss)
        self.samples += samples
        self.seconds += seconds
        if step % self._every == 0:
            self._point(step)

    def record_evaluation(self, step: int, quality: Quality) -> None:
        """Records the results of an evaluation on the validation part."""
        self.curves.evaluation_steps.append(step)
        self.curves.validation_auc.append(quality.auc)
        if self._bar.disable and not self._quiet:
            shown = "".join(f", {name}={value}" for name, value in self._shown.items())
            print(f"{self._name}: step {step:,} of {self._steps:,}{shown}", file=sys.stderr)

    def _point(self, step: int) -> None:
        loss = float(_mean_over_ranks(torch.stack(self._losses).mean()))
        self._losses.clear()
        self.curves.steps.append(step)
        self.curves.loss.append(loss)
        self._shown = shown = {"loss": f"{loss:.4f}", "samples/s": f"{self.samples / self.seconds:,.0f}"}
        if self._cache_stats is not None:
            stats = self._cache_stats()
            self.curves.hit_rate.append(hit_rate(stats, self._last_stats))
            self._last_stats = stats
            shown["cache hits"] = f"{self.curves.hit_rate[-1]:.1%}"
        self._bar.set_postfix(shown, refresh=False)


def train(
    name: str,
    model: nn.Module,
    optimizer: KeyedOptimizer,
    job: Job,
    cache_stats: Callable[[], CacheStats] | None = None,
    ahead: Callable[[Iterator[ClickBatch]], Iterator[ClickBatch]] = iter,
    quiet: bool = False,
) -> TrainResult:
    """Trains a model; evaluates it on the validation part at intervals, and on the test part at the end.

    `ahead` wraps the iterator of batches and may prepare the next ones; `quiet` shows no progress.
    """
    train_data, validation_data = job.data.select(job.split.train), job.data.select(job.split.validation)
    batch_size, steps = job.schedule.batch_size, job.schedule.steps(len(train_data))
    evaluate_every = math.ceil(steps / EVALUATIONS)
    batches = ahead(islice(job.schedule.batches(train_data), steps))
    begin = time.perf_counter()
    # Without a terminal (disable=None), tqdm shows no bar. The bar's format leaves out tqdm's own rate, which would
    # count evaluations as training.
    with tqdm(batches, desc=name, total=steps, dynamic_ncols=True, disable=quiet or None, bar_format=BAR) as bar:
        monitor = Monitor(bar, name, steps, cache_stats, quiet)
        for step, batch in enumerate(bar, start=1):
            start = time.perf_counter()
            loss = train_step(model, optimizer, batch)
            monitor.record(step, loss, batch.labels.numel(), time.perf_counter() - start)
            if step % evaluate_every == 0 or step == steps:
                monitor.record_evaluation(step, evaluate(model, validation_data, batch_size))
    seconds = time.perf_counter() - begin
    return TrainResult(
        test=evaluate(model, job.data.select(job.split.test), batch_size),
        steps=steps,
        seconds=seconds,
        training_seconds=monitor.seconds,
        samples_per_second=monitor.samples / monitor.seconds,
        curves=monitor.curves,
        cache=cache_stats() if cache_stats else None,
    )
