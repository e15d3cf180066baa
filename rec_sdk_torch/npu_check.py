"""`python -m rec_sdk_torch.npu_check`."""

from .runtime.command import run
from .tools.npu_check import main

if __name__ == "__main__":
    run("npu_check", main)
