"""Clipping when another library has replaced torch's functions, before or after this package is used.

The reference is torch's unmodified clipping. Clipping tables that are updated in the backward pass is an error.
"""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import single_ids
from collection_factory import apply, bags_collection
from torch.nn.utils import clip_grad
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer

import rec_sdk_torch as rst

Function = Callable[..., Any]
library = types.ModuleType("library")
"""A library that has its own references to torch's functions."""


def by_closure(function: Function) -> Function:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def by_wraps(function: Function) -> Function:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def from_library(*args: Any, **kwargs: Any) -> Any:
    return library.original(*args, **kwargs)


def by_name(function: Function) -> Function:
    library.original = function  # type: ignore[attr-defined]
    return functools.wraps(function)(from_library)


class Counted:
    """A callable object that wraps a function; its method calls the function too."""

    def __init__(self, function: Function) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def clip(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


CALLING: dict[str, Callable[[Function], Any]] = {
    "closure": by_closure,
    "functools.wraps": by_wraps,
    "global": by_name,
    "object": Counted,
    "method": lambda function: Counted(function).clip,
    "partial": functools.partial,
    "twice": lambda function: by_wraps(by_closure(function)),
}


def own_norm(parameters: Any, max_norm: float, *args: Any) -> torch.Tensor:
    """Clips gradients without calling torch's function, as some libraries do."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
    for grad in grads:
        grad.mul_(min(1.0, max_norm / float(norm)))
    return norm


def fresh(name: str) -> Function:
    """Returns a fresh, unmodified copy of torch's function."""
    made: Function = clip_grad._no_grad(inspect.unwrap(getattr(clip_grad, name)))
    return made


@pytest.mark.parametrize("modules", [(clip_grad,), (torch.nn.utils,), (clip_grad, torch.nn.utils)])
@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_"])
@pytest.mark.parametrize("kind", CALLING)
def test_a_library_that_calls_torchs_function(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, kind: str, name: str, modules: tuple[Any, ...]
) -> None:
    replaced = CALLING[kind](fresh(name))
    for module in modules:
        monkeypatch.setattr(module, name, replaced)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collection = bags_collection(device)
    with pytest.raises(ValueError, match=rf"{name} cannot clip the gradients of tables \['t0'\]"):
        getattr(modules[-1], name)(collection.parameters(), 1.0)


@pytest.mark.parametrize("module", [clip_grad, torch.nn.utils])
def test_a_library_that_clips_by_itself(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, module: types.ModuleType
) -> None:
    warning_text = rf"{module.__name__}.clip_grad_norm_ is {__name__}.own_norm, which does not call torch's function"
    monkeypatch.setattr(module, "clip_grad_norm_", own_norm)
    with pytest.warns(rst.ConfigurationWarning, match=warning_text):
        collection = bags_collection(device, update="step")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the warning is given only once
        bags_collection(device)
        apply(collection)
        monkeypatch.undo()
        collection(single_ids([1])).values().sum().backward()
        collection.fused_optimizer.step()
    monkeypatch.setattr(module, "clip_grad_norm_", own_norm)
    collection(single_ids([1])).values().sum().backward()
    with pytest.warns(rst.ConfigurationWarning, match=warning_text):
        collection.fused_optimizer.step()  # also detects a function that was replaced later


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("kind", ["closure", "functools.wraps"])
def test_a_library_that_wraps_torchrecs_clipping(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, kind: str, later: bool
) -> None:
    construct = inspect.unwrap(GradientClippingOptimizer.__init__)
    collection = bags_collection(device)
    monkeypatch.setattr(GradientClippingOptimizer, "__init__", construct)
    if later:
        apply(collection)
        _ = collection.fused_optimizer
    calling = CALLING[kind](GradientClippingOptimizer.__init__)
    monkeypatch.setattr(GradientClippingOptimizer, "__init__", calling)
    if not later:
        apply(collection)
    with pytest.raises(ValueError, match="cannot clip a fused optimizer"):
        GradientClippingOptimizer(collection.fused_optimizer, GradientClipping.NORM)
