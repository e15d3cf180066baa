"""`_engine.pyi`, which the build writes, matches the built module, and a type checker can read it."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

from rec_sdk_torch import _engine

ROOT = Path(__file__).resolve().parent.parent
MOST = 25


def test_the_stub_is_the_modules() -> None:
    written = Path(_engine.__file__).with_name("_engine.pyi").read_text()
    stub = runpy.run_path(str(ROOT / "cmake" / "write_stub.py"))["stub"]
    assert stub(_engine) == written
    names = {node.name for node in ast.walk(ast.parse(written)) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert {"Engine", "plan", "record_bytes", "CapacityError", "start_plans", "__init__"} <= names
    assert "pybind11" not in written


def test_no_class_has_more_than_25_members() -> None:
    classes = [value for value in vars(_engine).values() if isinstance(value, type)]
    assert {_engine.Engine, _engine.Tables, _engine.Saves, _engine.Lifecycle} <= set(classes)
    assert {each.__name__: len(own) for each in classes if len(own := public(each)) > MOST} == {}


def public(each: type) -> list[str]:
    """Lists the names of a class's public methods and attributes."""
    return [name for name in vars(each) if not name.startswith("_")]
