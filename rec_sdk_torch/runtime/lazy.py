"""Lazy packages: the names that a package's stub imports are loaded at their first use. `lazy_loader` does the same."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import former_names

_TORCHREC = {"torchrec", "fbgemm_gpu"}


_HIDDEN_FROM_DIR = {"compat"}
"""Packages that modify others when they are imported. `dir()` omits them, since tools import what `dir()` lists."""


def _exports(stub: Path) -> dict[str, str]:
    """Returns the module, relative to the package, of each name that the stub imports; "." if the name is a module."""
    imports = [node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)]
    return {alias.name: f"{'.' * node.level}{node.module or ''}" for node in imports for alias in node.names}


def _load(package: str, module: str, name: str) -> Any:
    try:
        if module == ".":
            return importlib.import_module(f".{name}", package)
        return getattr(importlib.import_module(module, package), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _TORCHREC:
            raise
        raise ImportError(f"{package}.{name} needs torchrec, which is not installed: {error}") from error
    except RuntimeError as error:
        problem = torch_npu_problem(error)
        if problem is None:
            raise
        raise ImportError(f"{package}.{name}: {problem}") from error


def torch_npu_problem(error: Exception) -> str | None:
    """Describes why torch_npu keeps torch from being imported, and what to do; returns None for any other error."""
    if not isinstance(error, RuntimeError) or "torch_npu" not in str(error):  # importing torch also loads torch_npu
        return None
    from .emulator import hint

    return (
        f"torch cannot be imported, since torch_npu is installed and does not load ({error.__cause__}). "
        f"To leave NPUs out, set TORCH_DEVICE_BACKEND_AUTOLOAD=0. {hint()}"
    )


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` of the package whose `__init__.py` is `file`.

    The names come from the stub beside `file`, so that Python and type checkers share one list. Modules in the stub are
    attributes of the package, but not in `__all__`, so that `import *` does not load them.
    """
    exports = _exports(Path(file).with_suffix(".pyi"))
    namespace = sys.modules[package].__dict__

    def load(name: str) -> Any:
        if name in former_names.CLASSES:
            return load(former_names.current_name(package, name))
        if name not in exports:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        namespace[name] = _load(package, exports[name], name)
        return namespace[name]

    shown = exports.keys() - _HIDDEN_FROM_DIR
    return load, lambda: sorted({*namespace, *shown}), sorted(name for name in exports if exports[name] != ".")
