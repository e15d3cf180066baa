"""`_engine.pyi`, which the build writes: it is that of the built module, and a type checker can read it."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

from rec_sdk_torch import _engine

ROOT = Path(__file__).resolve().parent.parent


def test_the_stub_is_the_modules() -> None:
    written = Path(_engine.__file__).with_name("_engine.pyi").read_text()
    stub = runpy.run_path(str(ROOT / "cmake" / "write_stub.py"))["stub"]
    assert stub(_engine) == written
    names = {node.name for node in ast.walk(ast.parse(written)) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert {"Engine", "plan", "record_bytes", "CapacityError", "begin", "__init__"} <= names
    assert "pybind11" not in written
