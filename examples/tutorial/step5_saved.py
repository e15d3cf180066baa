"""Step 5, saved and loaded: torchrun --nproc-per-node 2 examples/tutorial/step5_saved.py saves."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from clicks import evaluate, say
from step2_cached import make_model
from step4_two_ranks import sharded, train_ahead

from rec_sdk_torch import Saver


def save(model, folder, incremental=False):
    path = Saver().save(model, folder, incremental)  # called by all ranks together
    if dist.get_rank() == 0:
        torch.save(model.module.dense.state_dict(), folder / "dense.pt")
    say(f"saved {Path(path).name}")
    dist.barrier()


def load(model, folder):
    Saver().load(model, folder)
    model.module.dense.load_state_dict(torch.load(folder / "dense.pt"))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = sharded(make_model(is_incremental=True))  # records the changes since the last save
    optimizer = torch.optim.Adam(model.module.dense.parameters(), lr=0.01)
    train_ahead(model, optimizer, steps=200)
    save(model, folder)
    train_ahead(model, optimizer, steps=20)
    save(model, folder, incremental=True)
    again = sharded(make_model(is_incremental=True))
    load(again, folder)
    before, after = evaluate(model), evaluate(again)
    say(f"loss on five batches: {before:.4f} before the save, {after:.4f} after the load")
    dist.barrier()
    dist.destroy_process_group()
