"""The command `python -m rec_sdk_torch.emulate program.py`: runs a program on the emulated NPU."""

import sys

from .runtime.emulator import EmulatorUnavailableError, active, check, hint, library_directory, main

__all__ = ["EmulatorUnavailableError", "active", "check", "hint", "library_directory", "main"]

if __name__ == "__main__":
    sys.exit(main())
