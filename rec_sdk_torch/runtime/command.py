"""Shared code of the package's command-line tools: help that ends with an example, and one-line errors."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

BAD_USE = 2
"""The exit status after wrong arguments, the same as argparse's."""


class CommandParser(argparse.ArgumentParser):
    """The argument parser of `python -m rec_sdk_torch.<name>`."""

    def __init__(self, *args: Any, example: str = "", **kwargs: Any) -> None:
        """Creates a parser; all arguments except `example` are passed to argparse.

        Args:
            example: command lines that can be pasted, shown at the end of the help.
        """
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        if example:
            kwargs["epilog"] = "example:\n" + "".join(f"  {line}\n" for line in example.strip().splitlines())
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Prints the error in one line, and exits with `BAD_USE`."""
        complain(self.prog, f"{message}; --help shows what is allowed")
        sys.exit(BAD_USE)


def complain(program: str, message: object) -> None:
    """Prints an error to stderr in one line."""
    print(f"{program}: {' '.join(str(message).split())}", file=sys.stderr)


def run(name: str, main: Callable[[], int]) -> NoReturn:
    """Runs `main` and exits with the status it returns, or 1 if the reader of a pipe has closed it."""
    try:
        sys.exit(main())
    except BrokenPipeError:  # `| head` does this; stdout is redirected because Python flushes it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        complain(f"python -m rec_sdk_torch.{name}", "interrupted")
        sys.exit(BAD_USE)
