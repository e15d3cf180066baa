"""Errors a user of the examples can fix, and how a script reports them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path


class InputError(Exception):
    """Wrong input; the message is one line that names the file, column or option."""


def exit_code(run: Callable[[], None]) -> int:
    """Runs a script's body: 0, or 2 after one line on stderr instead of a traceback."""
    try:
        run()
    except InputError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 2
    return 0


def open_problem(path: Path, error: OSError) -> InputError:
    """The InputError for a file that cannot be read."""
    return InputError(f"cannot read {path}: {error.strerror or error}")
