"""Keeps lookups eager under torch.compile and torch.fx: a lookup plans its batch from the values of the ids."""

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

# These attributes of torch are looked up once, since the functions are called for each batch.
_tracing_state = torch._C._get_tracing_state
_dispatch_mode = torch._C._get_dispatch_mode
_PROXY_MODE = torch._C._TorchDispatchModeKey.PROXY
_transforms = torch._C._functorch.peek_interpreter_stack
_capturing: dict[str, Callable[[], bool]] = {}
"""For each device type in use, a function that returns whether its current stream is being captured into a graph."""

UNTRACEABLE = (
    "embedding tables cannot be traced: a lookup reads the ids of its batch in Python. Use torch.compile without "
    "fullgraph=True, where a lookup is a graph break; or torch.fx on the model around a collection, which is one node; "
    "export the dense part of a model by itself, or its tables as other modules with rec_sdk_torch.export"
)


def eager(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """Wraps a module's forward: it becomes one graph break under torch.compile, and one node of a torch.fx graph.

    `torch.compiler.disable` alone would add a dozen Python calls to each lookup; the first would import the compiler.
    """
    disabled: Any = _disable_dynamo(function)
    # The attributes that torch._dynamo.disable(reason=...) sets; with fullgraph=True, torch shows the message.
    disabled._torchdynamo_disable = True
    disabled._torchdynamo_disable_msg = UNTRACEABLE

    @functools.wraps(function)
    def called(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        if torch.compiler.is_dynamo_compiling():
            result: _Result = disabled(*args, **kwargs)
            return result
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, Proxy):
                result = _add_node(argument.tracer, args[0], args[1:], kwargs)
                return result
        return function(*args, **kwargs)

    return called


def _add_node(tracer: Any, module: Any, args: Any, kwargs: Any) -> Any:
    """Adds the call of `module` to the graph of a torch.fx tracer, as torch.fx does for its own leaf modules."""
    path = tracer.path_of_module(module)
    if not path:
        raise RuntimeError(f"{type(module).__name__} is the whole model: {UNTRACEABLE}")
    return tracer.create_proxy("call_module", path, args, kwargs)


def check_real(values: object) -> None:
    """Raises RuntimeError if `values` is a tracer's placeholder, which has no values, instead of a real tensor."""
    if isinstance(values, (FakeTensor, Proxy)):
        raise RuntimeError(f"{type(values).__name__} in place of a tensor: {UNTRACEABLE}")


def refuse_captures(kind: str) -> None:
    """Makes `check_batch` and `check_stream` raise while a stream of this device type ("cuda", "npu") is captured."""
    module = getattr(torch, kind)
    if hasattr(module, "is_current_stream_capturing"):  # without this function, the device has no graphs
        _capturing[kind] = module.is_current_stream_capturing


def check_stream() -> None:
    """Raises RuntimeError if the current stream of a device is being captured into a graph."""
    for kind, is_capturing in _capturing.items():
        if is_capturing():
            raise RuntimeError(
                f"embedding tables cannot be used while torch.{kind}.graph captures a stream: a replay would read and "
                "update the rows of the captured batch, in slots that other rows have by then. Capture the dense part "
                "of the model by itself, with the tables' output as its input"
            )


class NotScripted:
    """Base of modules for which torch.jit.script raises a clear error before it compiles their parts."""

    def __prepare_scriptable__(self) -> None:
        raise RuntimeError(f"{type(self).__name__} in a model that torch.jit.script compiles: {UNTRACEABLE}")


def check_batch(ids: object) -> None:
    """Raises RuntimeError for ids in a trace, in a torch.func transform, or in a graph capture.

    Tracers that run a model on real tensors (torch.jit.trace, ONNX export, make_fx) would record rows as constants.
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
