"""Trains a DLRM on Ascend NPUs: the tables in host memory with a cache on the NPU, the dense part on the NPU.

python examples/train_npu.py                                          one NPU
torchrun --nproc-per-node 2 examples/train_npu.py                     two
python -m rec_sdk_torch.emulate examples/train_npu.py --steps 50      without an NPU, on an emulated one

Nothing in this file knows of the emulation, but for the line that says which of the two it was.
"""

from __future__ import annotations

import support.environment  # noqa: F401  # first: what follows may be missing

# isort: split
import argparse
import os
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401  # makes torch know the device "npu" and the backend "hccl"
from dlrm.cached import cached_tables
from dlrm.data_generated import generated_clicks
from dlrm.model import DensePart
from sklearn.metrics import roc_auc_score
from support.clicks import ClickBatch, ClickData, random_split
from support.errors import exit_code
from support.options import Parser, dimension, fraction, log_size, positive_float, positive_int, seed
from support.training import hit_rate
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rec_sdk_torch import EmbCacheEmbeddingBagCollection, apply_optimizer_in_backward, emulate

REPORTS = 10  # lines about the loss


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = Parser(__doc__)
    parser.add_argument("--samples", type=log_size, default=60_000, help="clicks to generate (default %(default)s)")
    parser.add_argument("--steps", type=positive_int, metavar="N", help="stop after N steps (default: one epoch)")
    parser.add_argument("--batch-size", type=positive_int, default=64, help="of each NPU (default %(default)s)")
    parser.add_argument("--dim", type=dimension, default=16, help="embedding dimension (default %(default)s)")
    parser.add_argument("--lr", type=positive_float, default=0.001, help="of the dense part (default %(default)s)")
    parser.add_argument("--sparse-lr", type=positive_float, default=0.05, help="of the tables (default %(default)s)")
    parser.add_argument(
        "--cache", type=fraction, default=0.1, help="share of the rows on the NPU (default %(default)s)"
    )
    parser.add_argument("--seed", type=seed, default=0, help="of data, weights and order (default %(default)s)")
    return parser.parse_args()


def start() -> torch.device:
    """Joins the ranks that torchrun started, or makes a group of one."""
    torch.npu.set_device(int(os.environ.get("LOCAL_RANK", "0")))  # type: ignore[attr-defined]
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("hccl")
    else:
        dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    return torch.device("npu", torch.npu.current_device())  # type: ignore[attr-defined]


class OwnSamples(torch.autograd.Function):
    """This rank's rows of what was looked up for all ranks; its gradient comes from all of them."""

    @staticmethod
    def forward(ctx: Any, pooled: Tensor, rows: int) -> Tensor:
        """`pooled` is `[ranks * rows, columns]`, the same on every rank."""
        begin = dist.get_rank() * rows
        return pooled[begin : begin + rows].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Divides by the ranks, as DistributedDataParallel does: the loss is the mean over all samples."""
        (grad,) = grads
        ranks = dist.get_world_size()
        whole = grad.new_empty((ranks * len(grad), grad.shape[1]))
        dist.all_gather_into_tensor(whole, grad.contiguous())
        return whole / ranks, None


class Model:
    """Tables and dense part.

    The tables stay outside of DistributedDataParallel: their rows never have a `.grad` that it could average, because
    the backward itself updates them where they are, and their parameters are empty handles. So every rank holds all
    tables and looks up the samples of all ranks, which keeps the copies equal.
    """

    def __init__(self, tables: EmbCacheEmbeddingBagCollection, dense: DensePart, device: torch.device) -> None:
        self.tables = tables
        self.device = device
        self.dense = dense.to(device)
        self._parallel: nn.Module = self.dense
        if dist.get_world_size() > 1:
            self._parallel = DistributedDataParallel(self.dense, device_ids=[device.index])

    def loss(self, batch: ClickBatch) -> Tensor:
        """The loss of this rank's samples, in a batch that is the same on all ranks."""
        rows = len(batch.labels) // dist.get_world_size()
        own = slice(dist.get_rank() * rows, (dist.get_rank() + 1) * rows)
        # The ids stay on the host, where the tables plan their swaps.
        pooled: Tensor = OwnSamples.apply(self.tables(batch.sparse).values(), rows)
        logits = self._parallel(batch.dense[own].to(self.device), pooled)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels[own].to(self.device))

    @torch.no_grad()
    def auc(self, data: ClickData, batch_size: int) -> float:
        """On a log; the tables only read, so that ranks need not do it together."""
        self.tables.eval()
        scores = [
            self.dense(batch.dense.to(self.device), self.tables(batch.sparse).values()).cpu()
            for batch in data.batches(batch_size)
        ]
        self.tables.train()
        return float(roc_auc_score(data.labels.numpy(), torch.cat(scores).numpy()))


def batches(data: ClickData, options: argparse.Namespace) -> Iterator[ClickBatch]:
    """The batches of all ranks together, the same on every rank; an incomplete last one is left out."""
    size = options.batch_size * dist.get_world_size()
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(options.seed))
    for batch in islice(data.batches(size, order), options.steps):
        if len(batch.labels) == size:
            yield batch


def say(text: str) -> None:
    """Prints it once, whatever the number of ranks."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def run(options: argparse.Namespace, device: torch.device) -> None:
    """Trains, and judges the result on clicks that were held back."""
    data = generated_clicks(options.samples, options.seed)
    split = random_split(len(data), options.seed)
    train_data, test_data = data.select(split.train), data.select(split.test)
    size = options.batch_size * dist.get_world_size()
    tables = cached_tables(data, size, options.cache, options.dim, options.seed, device)
    apply_optimizer_in_backward(torch.optim.Adagrad, tables.parameters(), {"lr": options.sparse_lr})
    torch.manual_seed(options.seed)
    model = Model(tables, DensePart(len(data.features), options.dim, data.dense.shape[1]), device)
    optimizer = torch.optim.Adam(model.dense.parameters(), lr=options.lr)

    kind = "emulated, not an NPU" if emulate.active() else torch.npu.get_device_name(device)  # type: ignore[attr-defined]
    say(f"device       {device} ({kind}), {dist.get_world_size()} rank(s)")
    steps = min(options.steps or len(train_data), len(train_data) // (options.batch_size * dist.get_world_size()))
    losses: list[Tensor] = []
    for step, batch in enumerate(batches(train_data, options), start=1):
        optimizer.zero_grad()
        loss = model.loss(batch)
        loss.backward()  # updates the tables
        optimizer.step()
        losses.append(loss.detach())
        if step % max(1, steps // REPORTS) == 0:
            say(f"step {step:>7,} loss {torch.stack(losses).mean().item():.4f}")
            losses.clear()
    if dist.get_rank() == 0:
        stats = tables.cache_stats()
        print(f"test AUC     {model.auc(test_data, options.batch_size):.4f}")
        print(f"cache        {hit_rate(stats):.1%} hits, {stats['rows_in']:,} rows in, {stats['rows_out']:,} rows out")
    dist.barrier(device_ids=[device.index])


def main() -> None:
    """The script."""
    options = parse_options()
    device = start()
    run(options, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(exit_code(main))
