"""Errors that a user of the examples can correct, and how a script reports them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from support.environment import USAGE_ERROR, say


class InputError(Exception):
    """Invalid input; the message is one line that names the file, column or option."""


def exit_code(run: Callable[[], None]) -> int:
    """Runs a script's main function. Returns 0, or 2 after printing one line on stderr instead of a traceback."""
    try:
        run()
        sys.stdout.flush()
    except InputError as error:
        say(str(error))
    except OSError as error:
        if error.filename is not None:
            raise
        # Standard output is closed: buffered output must not be written again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        closed = isinstance(error, BrokenPipeError)  # the reader of the pipe, such as `head`, has ended
        say("the output was closed before the end" if closed else f"cannot write the output: {error.strerror}")
    else:
        return 0
    return USAGE_ERROR


def open_problem(path: Path, error: OSError) -> InputError:
    """Returns the InputError for a file that cannot be read."""
    return InputError(f"cannot read {path}: {error.strerror or error}")


def write_problem(path: Path, error: OSError) -> InputError:
    """Returns the InputError for a file that cannot be written."""
    return InputError(f"cannot write {path}: {error.strerror or error}")
