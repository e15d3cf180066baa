"""Trains a DLRM on Ascend NPUs: the tables in host memory with a cache on the NPU, the dense part on the NPU.

python examples/train_npu.py                                          one NPU
torchrun --nproc-per-node 2 examples/train_npu.py                     two
python -m rec_sdk_torch.emulate examples/train_npu.py --steps 50      without an NPU, on an emulated one

Only the line that prints the device depends on whether the NPU is emulated.
"""

from __future__ import annotations

import support.environment  # noqa: F401  # first: what follows may be missing

# isort: split
import argparse
import sys
from itertools import islice
from typing import cast

import torch
import torch_npu  # noqa: F401  # makes torch know the device "npu" and the backend "hccl"
from dlrm.data_generated import generated_clicks
from dlrm.ranks import Ranks, divide, join
from job.model import ClickModel, build_dense, build_tables, click_model
from sklearn.metrics import roc_auc_score
from support.clicks import random_split
from support.errors import exit_code
from support.options import Parser, add_click_options, positive_int
from support.training import Schedule, hit_rate
from torch import Tensor

from rec_sdk_torch import EmbCacheEmbeddingBagCollection, emulate

REPORTS = 10  # number of lines that report the loss


def parse_options() -> argparse.Namespace:
    """Parses the command line."""
    parser = Parser(__doc__)
    parser.add_argument("--steps", type=positive_int, metavar="N", help="stop after N steps (default: one epoch)")
    add_click_options(parser, 60_000, "of each NPU")
    return parser.parse_args()


def run(options: argparse.Namespace, ranks: Ranks) -> None:
    """Trains, and evaluates the result on clicks that were held out."""

    def say(text: str) -> None:
        if ranks.rank == 0:
            print(text, flush=True)

    data, device = generated_clicks(options.samples, options.seed), ranks.device
    split = random_split(len(data), options.seed)
    train_data, test_data = data.select(split.train), data.select(split.test)
    schedule = Schedule(options.batch_size, 1, options.steps, options.seed, ranks.rank, ranks.count)
    size = schedule.global_batch
    tables = build_tables(data, options.dim, options.seed, options.cache, size, options.sparse_lr, device)
    dense = build_dense(data, options.dim, options.seed).to(device)
    model = divide(ClickModel(tables, dense), list(data.features), ranks)
    optimizer = torch.optim.Adam(click_model(model).dense.parameters(), lr=options.lr)

    kind = "emulated, not an NPU" if emulate.active() else torch.npu.get_device_name(device)  # type: ignore[attr-defined]
    say(f"device       {device} ({kind}), {ranks.count} rank(s)")
    steps = schedule.steps(len(train_data))
    losses: list[Tensor] = []
    # The ids stay on the host, where the tables plan their swaps.
    for step, batch in enumerate(islice(schedule.batches(train_data), steps), start=1):
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()  # updates the tables
        optimizer.step()
        losses.append(loss.detach())
        if step % max(1, steps // REPORTS) == 0:
            say(f"step {step:>7,} loss {torch.stack(losses).mean().item():.4f}")
            losses.clear()
    stats = cast(EmbCacheEmbeddingBagCollection, click_model(model).embeddings).cache_stats()
    model.eval()
    with torch.no_grad():
        scores = torch.cat([model(batch)[1].cpu() for batch in test_data.batches(options.batch_size)])
    say(f"test AUC     {roc_auc_score(test_data.labels.numpy(), scores.numpy()):.4f}")
    say(f"cache        {hit_rate(stats):.1%} hits, {stats['rows_in']:,} rows in, {stats['rows_out']:,} rows out")
    ranks.leave()


def main() -> None:
    """Runs the script."""
    run(parse_options(), join("npu"))


if __name__ == "__main__":
    sys.exit(exit_code(main))
