"""Trains a model over click histories; the item table lives in host memory, its hot rows in a device cache.

python examples/train_sequence.py                            generated histories, nothing to download
python examples/train_sequence.py --movielens ml-100k        liked films, in order of time
"""

from __future__ import annotations

import support.environment  # noqa: F401  # first: what follows may be missing

# isort: split
import argparse
import sys
from pathlib import Path

import torch
from sequence.data_generated import generated_histories
from sequence.data_movielens import movielens_histories
from sequence.model import InterestModel
from support.clicks import ClickData, Split, ordered_split, random_split
from support.errors import exit_code
from support.optimizers import TABLE_OPTIMIZERS, dense_optimizer
from support.options import Parser, add_output_options, add_training_options, log_size, positive_int, prepare, report
from support.report import Report, table_sizes
from support.training import Job, Schedule, TrainResult, train
from torchrec.optim.keyed import CombinedOptimizer

from rec_sdk_torch import (
    EmbCacheEmbeddingCollection,
    EmbCacheEmbeddingConfig,
    InitializerType,
    apply_optimizer_in_backward,
)

TABLE = "item"


def parse_options() -> argparse.Namespace:
    """Parses the command line."""
    parser = Parser(__doc__)
    parser.add_argument("--movielens", type=Path, metavar="DIR", help="train on MovieLens-100K")
    parser.add_argument(
        "--samples", type=log_size, default=200_000, metavar="N", help="to generate (default %(default)s)"
    )
    parser.add_argument(
        "--history", type=positive_int, default=10, metavar="N", help="longest history (default %(default)s)"
    )
    add_training_options(parser)
    add_output_options(parser)
    return parser.parse_args()


def load_data(options: argparse.Namespace) -> tuple[str, ClickData, Split]:
    """Returns a description of the data, the samples, and their split: by time if they have times."""
    if options.movielens:
        data = movielens_histories(options.movielens, options.history)
        return f"MovieLens-100K in {options.movielens}, histories", data, ordered_split(len(data))
    data = generated_histories(options.samples, options.history, options.seed)
    return (
        f"{len(data):,} generated histories, seed {options.seed}",
        data,
        random_split(len(data), options.seed),
    )


def item_table(rows: int, options: argparse.Namespace) -> EmbCacheEmbeddingCollection:
    """Creates one table for both features: an item has the same row in the history and as the candidate."""
    return EmbCacheEmbeddingCollection(
        tables=[
            EmbCacheEmbeddingConfig(
                name=TABLE,
                feature_names=["history", "candidate"],
                num_embeddings=rows,
                embedding_dim=options.dim,
                initializer_type=InitializerType.TRUNCATED_NORMAL,
                weight_init_stddev=0.05,
            )
        ],
        batch_size=options.batch_size,
        multi_hot_sizes=[options.history + 1],
        cache=options.cache,
        seed=options.seed,
    )


def train_cached(tables: EmbCacheEmbeddingCollection, job: Job, options: argparse.Namespace) -> TrainResult:
    """Trains with a cached table: the backward pass updates rows in the device cache."""
    choice = TABLE_OPTIMIZERS[options.optimizer]
    apply_optimizer_in_backward(choice.optimizer_class, tables.parameters(), choice.options(options.sparse_lr))
    torch.manual_seed(options.seed)
    model = InterestModel(tables, options.dim)
    optimizer = CombinedOptimizer([tables.fused_optimizer, dense_optimizer(model, options.lr)])
    return train("cached", model, optimizer, job, tables.cache_stats)


def main() -> None:
    """Runs the script."""
    options = parse_options()
    prepare(options)
    name, data, split = load_data(options)
    schedule = Schedule(options.batch_size, options.epochs, options.steps, options.seed)
    rows = torch.unique(torch.cat([ids.values for ids in data.features.values()])).numel()
    tables = item_table(rows, options)
    sizes = table_sizes(tables.embedding_configs(), tables.cache_sizes)
    result = train_cached(tables, Job(data, split, schedule), options)
    report(Report(name, vars(options), sizes, result), options)


if __name__ == "__main__":
    sys.exit(exit_code(main))
