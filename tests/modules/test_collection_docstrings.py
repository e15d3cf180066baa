"""Every public name says what it is: `help()` and editors show nothing else."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

PACKAGES = [
    "rec_sdk_torch",
    "rec_sdk_torch.checkpoint",
    "rec_sdk_torch.export",
    "rec_sdk_torch.fbgemm",
    "rec_sdk_torch.ops",
    "rec_sdk_torch.serving",
    "rec_sdk_torch.tbe",
]
"""But for compat, which changes torch when it is imported: test_import looks at it in a process of its own."""
ASKED_BY_TORCH = {"forward", "extra_repr"}
"""Methods whose meaning is torch's."""


def public(package: Any) -> Iterator[tuple[str, Any]]:
    """Classes and functions of ours that a package shows."""
    for name in getattr(package, "__all__", None) or [name for name in vars(package) if not name.startswith("_")]:
        value = getattr(package, name)
        own = str(getattr(value, "__module__", "")).startswith("rec_sdk_torch")
        if own and (inspect.isclass(value) or inspect.isroutine(value)):
            yield name, value


def is_described(name: str, value: Any) -> bool:
    """Not by a base class, nor by what dataclasses write."""
    text = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    return bool(text and text.strip()) and not text.startswith(f"{name}(")


def methods(cls: type) -> Iterator[tuple[str, Any]]:
    for name, value in vars(cls).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        is_field = name in getattr(cls, "__dataclass_fields__", {})  # whose default is a function
        if not (name.startswith("_") or is_field) and inspect.isfunction(function):
            yield name, function


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_have_docstrings(package: str) -> None:
    pytest.importorskip("torchrec")
    module = importlib.import_module(package)
    assert module.__doc__
    found = dict(public(module))
    assert [name for name, value in found.items() if not is_described(name, value)] == []
    silent = [
        f"{name}.{method}"
        for name, value in found.items()
        if inspect.isclass(value)
        for method, function in methods(value)
        if not (function.__doc__ or method in ASKED_BY_TORCH)
    ]
    assert silent == []


def test_packages_have_names() -> None:
    pytest.importorskip("torchrec")
    sizes = {name: len(dict(public(importlib.import_module(name)))) for name in PACKAGES}
    assert sizes["rec_sdk_torch"] > 40
    assert all(sizes[name] for name in ("rec_sdk_torch.export", "rec_sdk_torch.fbgemm", "rec_sdk_torch.tbe"))
