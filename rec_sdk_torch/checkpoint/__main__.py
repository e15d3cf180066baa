"""Runs the command `python -m rec_sdk_torch.checkpoint`."""

from ..runtime.command import run
from ..tools.checkpoint import main

if __name__ == "__main__":
    run("checkpoint", main)
