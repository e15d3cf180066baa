"""The command `python -m rec_sdk_torch.doctor`: reports what works on this machine."""

from .runtime.command import run
from .tools.doctor.command import main

if __name__ == "__main__":
    run("doctor", main)
