"""Runs a script of the porting guide from initial weights that are the same for all scripts; prints all losses.

Usage: same_weights.py SCRIPT
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torchrec

import rec_sdk_torch as rst

script = Path(sys.argv[1])
sys.path.insert(0, str(script.parent))
import clicks  # noqa: E402

for config in (torchrec.EmbeddingBagConfig, rst.EmbCacheEmbeddingBagConfig):

    def zeros(self: Any, *args: Any, of: Any = config.__init__, **keywords: Any) -> None:
        of(self, *args, **{"init_fn": torch.nn.init.zeros_, **keywords})

    config.__init__ = zeros


class Model(clicks.Model):
    """The guide's model with the same dense weights in all scripts."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        torch.manual_seed(1)
        self.dense.reset_parameters()


def end(device: torch.device, losses: Any) -> None:
    """Prints the losses of rank 0."""
    if torch.distributed.get_rank() == 0:
        print("losses", *(f"{float(loss):.9g}" for loss in losses))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


clicks.Model, clicks.end = Model, end  # type: ignore[misc]
runpy.run_path(str(script), run_name="__main__")
