"""The command `python -m rec_sdk_torch.npu_check`: compares every operator on an NPU with the CPU."""

from .runtime.command import run
from .tools.npu_check import main

if __name__ == "__main__":
    run("npu_check", main)
