"""Writes the stub of a pybind11 extension module next to it: `write_stub.py rec_sdk_torch/_engine.so`.

pybind11 begins each docstring with the signature. Some of its types are replaced by ones that
type checkers accept.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

WORDS = [
    (r"typing\.SupportsInt \| typing\.SupportsIndex", "int"),
    (r"typing\.SupportsFloat \| typing\.SupportsIndex", "float"),
    (r"typing\.Annotated\[numpy\.typing\.ArrayLike, (numpy\.\w+)\]", r"numpy.typing.NDArray[\1]"),
    (r"numpy\.ndarray\b", "numpy.typing.NDArray[typing.Any]"),
    (r"(: \w+) = None", r"\1 | None = None"),
    (r"\b(self|arg0): \w+", "self"),
]


def load(path: Path) -> ModuleType:
    """Imports the extension module from its file, without importing the package."""
    spec = importlib.util.spec_from_file_location(path.name.partition(".")[0], path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def body(text: str, *lines: str) -> str:
    """Returns the indented body of a function or class: its docstring and its lines."""
    words = inspect.cleandoc(text.strip())
    return textwrap.indent("\n".join([*([f'"""{words}"""'] if words else []), *lines]) or "...", "    ")


def function(name: str, signature: str, text: str, module: str) -> str:
    """Returns the stub of a function, with the signature that pybind11 gave it."""
    signature = signature[signature.index("(") :].replace(f"{module}.", "")
    for pattern, replacement in WORDS:
        signature = re.sub(pattern, replacement, signature)
    return f"def {name}{signature}:\n{body(text)}"


def members(space: dict[str, Any], module: str) -> Iterator[str]:
    """Yields the stubs of a module's or class's members, in the order in which they were bound."""
    for name, value in space.items():
        signature, _, text = (value.__doc__ or "").partition("\n")
        if inspect.isclass(value):
            base = value.__base__.__name__.replace("pybind11_object", "object")
            yield f"class {name}({base}):\n{body(value.__doc__ or '', *members(dict(vars(value)), module))}"
        elif isinstance(value, property):
            yield f"@property\n{function(name, value.fget.__doc__.strip(), value.__doc__, module)}"
        elif signature.startswith(f"{name}(") and "->" in signature:
            yield function(name, signature, text, module)


def stub(module: ModuleType) -> str:
    """Returns the text of the stub."""
    imports = "import collections.abc\nimport typing\n\nimport numpy\nimport numpy.typing"
    text = f'"""{inspect.cleandoc(module.__doc__ or "")}"""'
    return "\n\n".join([text, imports, *members(dict(vars(module)), module.__name__)]) + "\n"


if __name__ == "__main__":
    library = Path(sys.argv[1])
    library.with_name(library.name.partition(".")[0] + ".pyi").write_text(stub(load(library)))
