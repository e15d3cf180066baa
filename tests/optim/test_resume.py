"""Training that resumes in a new process is bit-identical to uninterrupted training."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import forked_python
import pytest
import torch
from batches import jagged
from collection_factory import apply, bag_config, bags_collection
from torchrec import EmbeddingBagConfig
from torchrec.optim import CombinedOptimizer, KeyedOptimizerWrapper, WarmupOptimizer, WarmupPolicy, WarmupStage

import rec_sdk_torch as rst

HERE = Path(__file__).parent
STEPS = 3  # steps before the interruption, and after it


class Model(torch.nn.Module):
    """A model with a hash table, an index table and a dense layer whose optimizer has weight decay."""

    def __init__(self, device: torch.device, optimizer: str, cache: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        index = EmbeddingBagConfig(num_embeddings=9, embedding_dim=4, name="t1", feature_names=["f1"])
        self.tables = bags_collection(device, bag_config(), index, cache=cache)
        apply(self.tables, getattr(torch.optim, optimizer), lr=0.1)
        self.dense = torch.nn.Linear(8, 1).to(device)

    def optimizer(self, warmup: bool) -> CombinedOptimizer:
        named = dict(self.dense.named_parameters())
        dense: Any = KeyedOptimizerWrapper(named, lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1))
        if warmup:
            stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=STEPS + 1, value=0.1)]
            dense = WarmupOptimizer(dense, stages, lr=0.1)
        return CombinedOptimizer([("tables", self.tables.fused_optimizer), ("dense", dense)])

    def train_steps(self, optimizer: CombinedOptimizer, first: int) -> list[float]:
        losses = []
        for step in range(first, first + STEPS):
            batch = jagged({"f0": [[step, -step], [step + 1]], "f1": [[step % 9], [0, 8]]})
            optimizer.zero_grad()
            loss = self.dense(self.tables(batch).values()).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses


def resume(checkpoint: str, device: str, optimizer_name: str, warmup: str) -> None:
    """Resumes training as docs/optimizers.md describes: in a new process, with another cache size, from the
    file alone.
    """
    model = Model(torch.device(device), optimizer_name, cache=9)
    optimizer = model.optimizer(warmup == "True")
    saved = torch.load(checkpoint)
    optimizer.init_state()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    print(model.train_steps(optimizer, STEPS))


@pytest.mark.parametrize(("optimizer_name", "warmup"), [("SGD", False), ("Adagrad", True), ("Adam", False)])
def test_resume_in_a_new_process(device: torch.device, tmp_path: Path, optimizer_name: str, warmup: bool) -> None:
    model = Model(device, optimizer_name, cache=5)
    optimizer = model.optimizer(warmup)
    model.train_steps(optimizer, 0)
    checkpoint = tmp_path / "checkpoint.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
    folders = [str(Path(rst.__file__).parents[1]), str(HERE.parent)]
    given = (__file__, checkpoint, device, optimizer_name, warmup)
    done = forked_python.python(*map(str, given), PYTHONPATH=os.pathsep.join(folders))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(model.train_steps(optimizer, STEPS))


if __name__ == "__main__":
    resume(*sys.argv[1:])
