"""Trains a DLRM whose embedding tables live in host memory, with a small device cache for their hot rows.

python examples/train_dlrm.py                                  a generated click log, nothing to download
python examples/train_dlrm.py --movielens ml-100k --baseline   ... against plain torch.nn.EmbeddingBag
python examples/train_dlrm.py --criteo train.txt.gz --samples 1000000 --plot run.png
torchrun --nproc-per-node 2 examples/train_dlrm.py             the tables divided between two processes
"""

from __future__ import annotations

import support.environment  # noqa: F401  # first: what follows may be missing

# isort: split
import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from dlrm.cached import WEIGHTS, cached_tables
from dlrm.data_criteo import criteo_clicks
from dlrm.data_generated import generated_clicks
from dlrm.data_movielens import movielens_clicks
from dlrm.model import DLRM
from dlrm.plain import PlainTables, initial_weights
from dlrm.ranks import Ranks, divide, join
from support.clicks import ClickData, random_split
from support.errors import InputError, exit_code
from support.optimizers import TABLE_OPTIMIZERS, dense_optimizer
from support.options import Parser, add_output_options, add_training_options, log_size, prepare, report
from support.report import Report, table_sizes
from support.training import Job, Schedule, TrainResult, train
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from rec_sdk_torch import EmbCacheEmbeddingBagCollection, apply_optimizer_in_backward, prefetch

GENERATED_SAMPLES = 200_000


def parse_options() -> argparse.Namespace:
    """Parses the command line."""
    parser = Parser(__doc__)
    data = parser.add_mutually_exclusive_group()
    data.add_argument("--movielens", type=Path, metavar="DIR", help="train on MovieLens-100K")
    data.add_argument("--criteo", type=Path, metavar="FILE", help="train on a Criteo display-advertising file")
    parser.add_argument(
        "--samples",
        type=log_size,
        metavar="N",
        help=f"clicks to generate (default {GENERATED_SAMPLES:,}), or Criteo lines to read (default all)",
    )
    parser.add_argument("--baseline", action="store_true", help="also train plain torch.nn.EmbeddingBag tables")
    parser.add_argument(
        "--weights", choices=WEIGHTS, default="fp32", help="data type of the tables' weights (default %(default)s)"
    )
    add_training_options(parser)
    add_output_options(parser)
    return parser.parse_args()


def load_data(options: argparse.Namespace) -> tuple[str, ClickData]:
    """Returns a description of the click log, and the log."""
    if options.movielens:
        return f"MovieLens-100K in {options.movielens}", movielens_clicks(options.movielens)
    if options.criteo:
        return f"Criteo clicks in {options.criteo}", criteo_clicks(options.criteo, options.samples)
    samples = options.samples or GENERATED_SAMPLES
    return f"{samples:,} generated clicks, seed {options.seed}", generated_clicks(samples, options.seed)


def build_model(tables: nn.Module, data: ClickData, options: argparse.Namespace) -> DLRM:
    """Builds the model around the tables. The seed alone determines its dense weights."""
    torch.manual_seed(options.seed)
    return DLRM(tables, len(data.features), options.dim, data.dense.shape[1])


def train_cached(
    tables: EmbCacheEmbeddingBagCollection, job: Job, options: argparse.Namespace, ranks: Ranks
) -> TrainResult:
    """Trains with cached tables: the backward pass updates rows in the device cache of the rank that holds them."""
    choice = TABLE_OPTIMIZERS[options.optimizer]
    apply_optimizer_in_backward(choice.optimizer_class, tables.parameters(), choice.options(options.sparse_lr))
    model = build_model(tables, job.data, options)
    if ranks.count == 1:
        optimizer = CombinedOptimizer([tables.fused_optimizer, dense_optimizer(model, options.lr)])
        return train("cached", model, optimizer, job, tables.cache_stats)
    divided = divide(model, list(job.data.features), ranks)
    assert isinstance(divided, DistributedModelParallel)
    optimizer = CombinedOptimizer([divided.fused_optimizer, dense_optimizer(divided, options.lr)])
    stats = divided.module.embeddings.cache_stats
    # The ids of the next batches are exchanged and planned while the model trains on the current batch.
    return train("cached", divided, optimizer, job, stats, lambda batches: prefetch(batches, divided), ranks.rank > 0)


def train_plain(weights: dict[str, Tensor], job: Job, options: argparse.Namespace) -> TrainResult:
    """Trains from the same weights on the same batches, with tables entirely in memory and torch's own optimizers."""
    choice = TABLE_OPTIMIZERS[options.optimizer]
    tables = PlainTables(weights, choice.takes_sparse_gradients)
    model = build_model(tables, job.data, options)
    table_optimizer = KeyedOptimizerWrapper(
        dict(tables.named_parameters()), lambda parameters: choice.create(parameters, options.sparse_lr)
    )
    optimizer = CombinedOptimizer([table_optimizer, dense_optimizer(model, options.lr)])
    return train("plain", model, optimizer, job)


def run(options: argparse.Namespace, ranks: Ranks) -> Report:
    """Loads the data and trains with cached tables and, with --baseline, also with plain ones."""
    if options.baseline and ranks.count > 1:
        raise InputError(f"--baseline is for a single process, not for the {ranks.count} of torchrun")
    name, data = load_data(options)
    split = random_split(len(data), options.seed)
    schedule = Schedule(options.batch_size, options.epochs, options.steps, options.seed, ranks.rank, ranks.count)
    job = Job(data, split, schedule)
    size, share = schedule.global_batch, options.cache
    tables = cached_tables(data, size, share, options.dim, options.seed, weights=options.weights)
    sizes = table_sizes(tables.embedding_bag_configs(), tables.cache_sizes)
    if not options.baseline:
        return Report(name, vars(options), sizes, train_cached(tables, job, options, ranks))
    vocabularies = data.vocabularies()
    weights = initial_weights(tables, vocabularies)
    cached = train_cached(tables, job, options, ranks)
    plain = train_plain(weights, replace(job, data=data.with_dense_ids(vocabularies)), options)
    return Report(name, vars(options), sizes, cached, plain)


def main() -> None:
    """Runs the script."""
    options = parse_options()
    prepare(options)
    ranks = join("cpu")
    finished = run(options, ranks)
    if ranks.rank == 0:
        report(finished, options)
    ranks.leave()


if __name__ == "__main__":
    sys.exit(exit_code(main))
