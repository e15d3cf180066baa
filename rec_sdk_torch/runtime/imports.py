"""Import hooks, which run a function as soon as any code imports a certain module of another package."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

Action = Callable[[Any], None]


def after_import(name: str, action: Action) -> None:
    """Calls `action` with the module `name`: at once if the module is imported already, else right after its import."""
    if name in sys.modules:
        action(sys.modules[name])
    elif not any(isinstance(finder, _ImportHook) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _ImportHook(name, action))


class _ImportHook(importlib.abc.MetaPathFinder):
    """A finder that lets other finders load the module `name`, and then calls the action."""

    def __init__(self, name: str, action: Action) -> None:
        self.name, self._action = name, action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader, action = spec.loader, self._action
            run = loader.exec_module

            def run_and_act(module: types.ModuleType) -> None:
                run(module)
                action(module)

            loader.exec_module = run_and_act  # type: ignore[method-assign]
        return spec
