"""The command `python -m rec_sdk_torch.cache_advice`: recommends a cache size and a cache policy."""

from .runtime.command import run
from .tools.cache_advice.command import main

if __name__ == "__main__":
    run("cache_advice", main)
