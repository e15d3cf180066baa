"""Leaves lookups to Python in tracers and torch.compile: a lookup plans its batch by the ids' values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Proxy

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")

# Each batch asks these: they are found once.
_tracing_state = torch._C._get_tracing_state
_dispatch_mode = torch._C._get_dispatch_mode
_PROXY_MODE = torch._C._TorchDispatchModeKey.PROXY
_transforms = torch._C._functorch.peek_interpreter_stack
_capturing: dict[str, Callable[[], bool]] = {}
"""By kind of device, whether its current stream is being captured into a graph; kinds that have been used."""

UNTRACEABLE = (
    "embedding tables cannot be traced: a lookup reads the ids of its batch in Python. Use torch.compile without "
    "fullgraph=True, where a lookup is a graph break; or torch.fx on the model around a collection, which is one node; "
    "export the dense part of a model by itself, or its tables as other modules with rec_sdk_torch.export"
)


def eager(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """`function`, a module's forward: one graph break under torch.compile, one node of a torch.fx graph.

    `torch.compiler.disable` alone makes a dozen calls each time, and imports the compiler at the first.
    """
    disabled: Any = _disable_dynamo(function)
    # torch._dynamo.disable(reason=) would set this: fullgraph=True shows it to the user.
    disabled._torchdynamo_disable = True
    disabled._torchdynamo_disable_msg = UNTRACEABLE

    @functools.wraps(function)
    def called(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        if torch.compiler.is_dynamo_compiling():
            result: _Result = disabled(*args, **kwargs)
            return result
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, Proxy):
                result = _node(argument.tracer, args[0], args[1:], kwargs)
                return result
        return function(*args, **kwargs)

    return called


def _node(tracer: Any, module: Any, args: Any, kwargs: Any) -> Any:
    """The call of `module` in the graph that `tracer` makes, as of one of torch's own modules."""
    path = tracer.path_of_module(module)
    if not path:
        raise RuntimeError(f"{type(module).__name__} is all of the model: {UNTRACEABLE}")
    return tracer.create_proxy("call_module", path, args, kwargs)


def check_real(values: object) -> None:
    """Raises RuntimeError where a tracer has put something without values in place of a batch or a parameter."""
    if isinstance(values, (FakeTensor, Proxy)):
        raise RuntimeError(f"{type(values).__name__} in place of a tensor: {UNTRACEABLE}")


def refuse_captures(kind: str) -> None:
    """Lets `check_batch` and `check_stream` refuse captures of streams of a kind of device, such as "cuda" or "npu"."""
    module = getattr(torch, kind)
    if hasattr(module, "is_current_stream_capturing"):  # else the device has no graphs
        _capturing[kind] = module.is_current_stream_capturing


def check_stream() -> None:
    """Raises RuntimeError where the current stream of a device is being captured."""
    for kind, is_capturing in _capturing.items():
        if is_capturing():
            raise RuntimeError(
                f"embedding tables cannot be used while torch.{kind}.graph captures a stream: a replay would read and "
                "update the rows of the captured batch, in slots that other rows have by then. Capture the dense part "
                "of the model by itself, with the tables' output as its input"
            )


class NotScripted:
    """A module that torch.jit.script refuses before it looks at what the module is made of."""

    def __prepare_scriptable__(self) -> None:
        raise RuntimeError(f"{type(self).__name__} in a model that torch.jit.script compiles: {UNTRACEABLE}")


def check_batch(ids: object) -> None:
    """Raises RuntimeError for ids that cannot be read: those of a tracer, in a function transform, or in a capture.

    Tracers that run a model on real tensors (torch.jit.trace, ONNX through it, make_fx) would note rows as constants.
    """
    if isinstance(ids, (FakeTensor, Proxy)):
        check_real(ids)
    if _tracing_state() is not None:
        raise RuntimeError(f"torch.jit.trace of a model with tables: {UNTRACEABLE}")
    if _dispatch_mode(_PROXY_MODE) is not None:
        raise RuntimeError(f"make_fx of a model with tables: {UNTRACEABLE}")
    if _transforms() is not None:
        raise RuntimeError(
            "embedding tables cannot be looked up in a function that torch.func transforms (grad, vmap): look them up "
            "before, and give the function their output"
        )
    if _capturing:
        check_stream()
