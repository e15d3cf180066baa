"""`_engine.pyi`, written by hand, says what the built module has: names, arguments, defaults and results."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rec_sdk_torch import _engine

STUB = Path(_engine.__file__).with_name("_engine.pyi")
ALIASES = {"_Bytes": "uint8", "_Float": "float32", "_Int32": "int32", "_Int64": "int64"}
Function = ast.FunctionDef


def signature(function: Function) -> str:
    """Names, defaults and the kind of arguments; the first, of a method, is `self` whatever pybind11 calls it."""
    bare = ast.parse(ast.unparse(function)).body[0]
    assert isinstance(bare, Function)
    for argument in [*bare.args.args, *bare.args.kwonlyargs]:
        argument.annotation = None
        argument.arg = "self" if argument.arg == "arg0" else argument.arg
    return ast.unparse(bare.args)


def result(function: Function) -> str:
    text = ast.unparse(function.returns) if function.returns else ""
    for alias, dtype in ALIASES.items():
        text = re.sub(rf"\b{alias}\b", f"numpy.typing.NDArray[numpy.{dtype}]", text)
    text = text.replace("rec_sdk_torch._engine.", "")
    text = text.replace("dict[str, npt.NDArray[Any]]", "dict")  # pybind11 does not know more
    return re.sub(r"^tuple\[.*", "tuple", text)  # pybind11 does not know what is in some of them


def parsed(name: str, line: str) -> Function:
    """A line such as `plan(self: Engine, ...) -> Plan`, as pybind11 begins docstrings."""
    function = ast.parse(f"def {name}{line[line.index('(') :]}: ...").body[0]
    assert isinstance(function, Function)
    return function


def described(name: str, function: Function) -> str:
    return f"{name}({signature(function)}) -> {result(function)}"


def of_stub() -> set[str]:
    def members(prefix: str, body: list[ast.stmt]) -> set[str]:
        found: set[str] = set()
        for node in body:
            if isinstance(node, ast.ClassDef):
                found |= {f"class {node.name}"} | members(f"{node.name}.", node.body)
            elif isinstance(node, Function):
                found.add(described(prefix + node.name, node))
        return found

    return members("", ast.parse(STUB.read_text()).body)


def of_module(module: ModuleType) -> set[str]:
    def members(prefix: str, space: dict[str, Any]) -> set[str]:
        found: set[str] = set()
        for name, value in space.items():
            getter: Callable[..., Any] = getattr(value, "fget", value)
            line = (getattr(getter, "__doc__", None) or "").splitlines()[:1]
            if isinstance(value, type):
                found |= {f"class {name}"} | members(f"{name}.", dict(vars(value)))
            elif (name == "__init__" or not name.startswith("_")) and line and "->" in line[0]:
                found.add(described(prefix + name, parsed(name, line[0])))
            elif not name.startswith("_"):
                found.add(f"{prefix}{name}: no signature")
        return found

    return members("", dict(vars(module)))


def test_stub_is_the_module() -> None:
    stub, module = of_stub(), of_module(_engine)
    assert len(module) > 50, "signatures were found"
    assert sorted(stub - module) == [], "only in _engine.pyi"
    assert sorted(module - stub) == [], "only in the module"
