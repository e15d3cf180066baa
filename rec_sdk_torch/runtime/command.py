"""The commands of the package share this: `--help` that teaches, and errors of one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

BAD_USE = 2
"""The exit status of a command that was called wrongly, as argparse has it."""


class CommandParser(argparse.ArgumentParser):
    """Reads the command line of `python -m rec_sdk_torch.<name>`."""

    def __init__(self, *args: Any, example: str = "", **kwargs: Any) -> None:
        """`example`: lines that can be pasted, with which the help ends; the rest is argparse's."""
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        if example:
            kwargs["epilog"] = "example:\n" + "".join(f"  {line}\n" for line in example.strip().splitlines())
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Says in one line what is wrong, and ends the process."""
        complain(self.prog, f"{message}; --help shows what is allowed")
        sys.exit(BAD_USE)


def complain(program: str, message: object) -> None:
    """Prints an error as one line."""
    print(f"{program}: {' '.join(str(message).split())}", file=sys.stderr)


def run(name: str, main: Callable[[], int]) -> NoReturn:
    """Runs a command as a process, which ends with the status that `main` returns; 1 if its reader is gone."""
    try:
        sys.exit(main())
    except BrokenPipeError:  # of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        complain(f"python -m rec_sdk_torch.{name}", "interrupted")
        sys.exit(BAD_USE)
