"""Files of the package import only lower layers, and imports form no cycle.

Imports for type checkers, inside functions and through importlib count as well.
"""

from __future__ import annotations

import ast
import functools
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "rec_sdk_torch"
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in [*(ROOT / PACKAGE).rglob("*.py"), ROOT / PACKAGE / "_engine.pyi"]
}

FLOORS = {
    "operators": ["segments", "record", "schemas", "default", "devices", "calls"],
    "saves": ["owners", "format", "participants", "load", "save", "saver", "serve"],
    "tbe": ["config", "options", "cache", "rows", "step", "table_methods", "embedding"],
}
"""The folders and files of each folder, from the lowest layer to the highest."""
ROOT_FILES = {
    *("__init__", "__main__", "_engine"),
    *("cache_advice", "doctor", "emulate", "npu_check"),  # commands
    *("export", "ops", "record", "serving"),
}
"""Top-level files, which users import or run."""

DOORS = {
    f"{PACKAGE}.tbe.rows.{file}"
    for file in (
        "gradients",
        "move",
        "replacement",
        "row_parts",
        "snapshot",
        "table_chunks",
        "table_lifecycle",
        "table_view",
    )
}
"""Files outside `cache` that may call the engine of a group."""


@functools.cache
def imports(module: str) -> frozenset[str]:
    """Returns the modules of the package that a module imports."""
    return frozenset(imported_modules(module))


def imported_modules(module: str) -> Iterator[str]:
    path = FILES[module]
    parts, stub = module.split("."), path.with_suffix(".pyi")
    package = parts if path.name == "__init__.py" else parts[:-1]
    sources = [path, stub] if path.suffix == ".py" and stub.exists() else [path]
    for node in (node for source in sources for node in ast.walk(ast.parse(source.read_text()))):
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield from ([name] if name in FILES else [base] if base in FILES else [])
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FILES)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and arg.value in FILES)


def room(module: str) -> str:
    """Returns the folder or file of the package that contains a module."""
    return ".".join(module.split(".")[:2])


def test_every_import_is_found() -> None:
    assert "rec_sdk_torch.tbe.cache.batch" in imports("rec_sdk_torch.tbe.embedding")
    assert "rec_sdk_torch.runtime.worker" in imports("rec_sdk_torch.tbe.step.prefetch_queue")
    assert "rec_sdk_torch.optim.optimizer_assignments" in imports("rec_sdk_torch.optim.handles")
    assert "rec_sdk_torch.compat.dynamicemb.cuda_names" in imports("rec_sdk_torch.compat.names"), "by a string"


def cycle(arrows: dict[str, set[str]]) -> str | None:
    """Returns a cycle of imports as text; None if there is none."""
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as error:
        return " <- ".join(error.args[1])
    return None


def test_no_circle_of_files() -> None:
    found = cycle({module: imports(module) - {module} for module in FILES})
    assert found is None, f"files import each other: {found}"


def test_rooms_have_an_order() -> None:
    arrows: dict[str, set[str]] = {}
    for module in FILES:
        if room(module) != PACKAGE:  # the package's own __init__ re-exports names of all folders
            below = {room(other) for other in imports(module)} - {room(module), PACKAGE}
            arrows.setdefault(room(module), set()).update(below)
    found = cycle(arrows)
    assert found is None, f"rooms import each other: {found}"


@pytest.mark.parametrize("name", FLOORS)
def test_a_room_imports_what_is_below(name: str) -> None:
    above = f"{PACKAGE}.{name}."
    floors = {module: FLOORS[name].index(module.split(".")[2]) for module in FILES if module.startswith(above)}
    assert set(floors.values()) == set(range(len(FLOORS[name])))
    upwards = [
        f"{module} imports {other}"
        for module in floors
        for other in imports(module)
        if floors.get(other, -1) > floors[module]
    ]
    assert not upwards


def test_top_level_files_are_what_users_import() -> None:
    assert {path.stem for path in (ROOT / PACKAGE).glob("*.py")} == ROOT_FILES


def uses(module: str, attribute: str) -> bool:
    """Returns whether a file gets or sets an attribute of this name."""
    nodes = ast.walk(ast.parse(FILES[module].read_text()))
    return any(isinstance(node, ast.Attribute) and node.attr == attribute for node in nodes)


def test_one_door_to_whole_tables() -> None:
    callers = {module for module in FILES if uses(module, "engine") and not module.startswith(f"{PACKAGE}.tbe.cache.")}
    assert callers == DOORS
