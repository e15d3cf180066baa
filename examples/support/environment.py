"""Import-time check that reports in one line why a script cannot run here. Scripts import it first. It also reports an
interruption in one line.

It needs only the standard library, because no other package may be installed.
"""

from __future__ import annotations

import logging
import sys
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

NEEDED = ("torch", "torchrec", "sklearn", "tqdm", "rec_sdk_torch")
ROOT = Path(__file__).resolve().parents[2]
USAGE_ERROR = 2


def say(message: str) -> None:
    """Prints one line on stderr, beginning with the script's name."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)


def _uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Handles uncaught exceptions as Python does, except for Ctrl-C, which may also interrupt the imports."""
    if issubclass(kind, KeyboardInterrupt):
        say("interrupted")
    else:
        sys.__excepthook__(kind, error, traceback)


def _problem(script: str) -> str | None:
    command = f"Run: make -C {ROOT} build && {ROOT}/.venv/bin/python {ROOT}/examples/{script}"
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        return f"{sys.executable} has no {', '.join(missing)}. {command}"
    if find_spec("rec_sdk_torch._engine") is None:
        return f"rec_sdk_torch is not built for {sys.executable}. {command}"
    import rec_sdk_torch
    from rec_sdk_torch import emulate

    try:
        rec_sdk_torch.TableBatchedEmbedding  # noqa: B018  # imports torch, which torch_npu can keep from working
    except ImportError as error:
        return str(error)
    if script == "train_npu.py" and find_spec("torch_npu") is None:
        return f"torch_npu is not installed for {sys.executable}. {emulate.hint()}"
    return None


sys.excepthook = _uncaught
# TorchRec calls a function that checks for tracing, and torch logs a warning that the result may be wrong.
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
problem = _problem(Path(sys.argv[0]).name)
if problem:
    say(problem)
    sys.exit(USAGE_ERROR)
