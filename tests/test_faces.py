"""Other folders import only the names in the stub of `tbe`, and use no private attribute of another folder's class."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch
from test_layers import FILES, PACKAGE, ROOT, room

FACE = f"{PACKAGE}.tbe"
STUBS = {PACKAGE: ROOT / PACKAGE / "__init__.pyi", FACE: ROOT / PACKAGE / "tbe" / "__init__.pyi"}
MOST_NAMES = 70
MOST_PRIVATE = 8
"""The largest number of private attributes of other classes that files may use, within their folder."""
OF_OTHERS = {
    *("_fields", "_is_owned", "_replace"),  # attributes of named tuples and locks
    *("_opt_called", "_optimizer", "_optimizer_kwargs"),  # attributes of torch's and TorchRec's optimizers
    *("_keys", "_lengths", "_offsets", "_weights"),  # attributes of TorchRec's jagged tensors
    *dir(torch.nn.Module()),
}
"""Attributes that classes of other libraries have."""


def inside(module: str) -> bool:
    """Returns whether a module is the room itself or is inside it."""
    return module == FACE or module.startswith(f"{FACE}.")


def names_from(module: str, source: str, package: bool) -> Iterator[tuple[str, str]]:
    """Yields (module of the package, imported name) for each import in a source; the name is "*" if a module is
    imported.
    """
    parts = module.split(".")
    folder = parts if package else parts[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            above = folder[: len(folder) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield (whole, "*") if whole in FILES else (base, alias.name)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "*") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from ((arg.value, "*") for arg in node.args if isinstance(arg, ast.Constant))


def from_outside() -> Iterator[tuple[str, str, str]]:
    """Yields (importing file, module, name) for each import from the room by another room."""
    sources = [(module, path.read_text(), path.name == "__init__.py") for module, path in FILES.items()]
    sources.append((PACKAGE, STUBS[PACKAGE].read_text(), True))
    for module, source, package in sources:
        if not inside(module):
            yield from ((module, of, name) for of, name in names_from(module, source, package) if inside(str(of)))


def test_other_rooms_import_public_names_only() -> None:
    inner = [f"{module} imports {of}: {name}" for module, of, name in from_outside() if of != FACE]
    assert not inner


def test_the_stub_has_no_unused_name() -> None:
    named = [name for _, name in names_from(FACE, STUBS[FACE].read_text(), package=True)]
    assert len(named) == len(set(named)) <= MOST_NAMES
    assert set(named) - {name for _, _, name in from_outside()} == set()


# ---- private attributes


def defined(part: ast.AST) -> Iterator[str]:
    """Yields the private names that a class defines: methods, fields and attributes of `self`."""
    for node in ast.walk(part):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            name = node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_itself(node):
            name = node.attr
        else:
            continue
        if name.startswith("_") and not name.endswith("__") and name not in OF_OTHERS:
            yield name


def of_itself(node: ast.Attribute) -> bool:
    return ast.unparse(node.value) in ("self", "cls", "super()")


def private_uses() -> tuple[list[str], list[str]]:
    """Returns uses of private attributes: of classes of other rooms, and of other classes in the same room."""
    owners: dict[str, set[str]] = {}
    found = []
    for module, path in FILES.items():
        tree = ast.parse(path.read_text())
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        for part in tree.body:
            own = set(defined(part)) if part in classes else set()
            for name in own:
                owners.setdefault(name, set()).add(room(module))
            attributes = [node for node in ast.walk(part) if isinstance(node, ast.Attribute)]
            found += [(module, each) for each in attributes if not of_itself(each) and each.attr not in own]
    of_rooms, of_classes = [], []
    for module, each in found:
        if each.attr in owners:
            uses = of_classes if room(module) in owners[each.attr] else of_rooms
            uses.append(f"{module}: {ast.unparse(each)}")
    return of_rooms, of_classes


def test_no_room_uses_private_attributes_of_another() -> None:
    of_rooms, of_classes = private_uses()
    assert not of_rooms
    assert len(of_classes) <= MOST_PRIVATE, of_classes
