"""Errors a user of the examples can fix, and how a script reports them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from support.environment import USAGE_ERROR, say


class InputError(Exception):
    """Wrong input; the message is one line that names the file, column or option."""


def exit_code(run: Callable[[], None]) -> int:
    """Runs a script's body: 0, or 2 after one line on stderr instead of a traceback."""
    try:
        run()
        sys.stdout.flush()
    except InputError as error:
        say(str(error))
    except OSError as error:
        if error.filename is not None:
            raise
        # Standard output: what is still buffered is not to be tried again at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        closed = isinstance(error, BrokenPipeError)  # by a reader such as `head` that has seen enough
        say("the output was closed before the end" if closed else f"cannot write the output: {error.strerror}")
    else:
        return 0
    return USAGE_ERROR


def open_problem(path: Path, error: OSError) -> InputError:
    """The InputError for a file that cannot be read."""
    return InputError(f"cannot read {path}: {error.strerror or error}")


def write_problem(path: Path, error: OSError) -> InputError:
    """The InputError for a file that cannot be written."""
    return InputError(f"cannot write {path}: {error.strerror or error}")
