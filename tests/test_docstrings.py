"""The API reference: every public name is in it, says what its arguments are, and has an example that runs."""

from __future__ import annotations

import ast
import doctest
import enum
import importlib
import inspect
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

import rec_sdk_torch

pytest.importorskip("torchrec")

from rec_sdk_torch.modules.configs import _WITHOUT_EFFECT

ROOT = Path(__file__).resolve().parent.parent
API = ROOT / "docs" / "api"
OTHERS = [
    "export.quantize_save",
    "export.quantized",
    "export.to_arrays",
    "export.to_embedding_bags",
    "export.to_safetensors",
    "export.to_torchrec",
    "serving.TableReader",
]
"""Names of its modules that users call."""
OF_THE_ENGINE = {"CacheTooSmallError", "CapacityError"}
"""Classes of the C++ library; their page has the examples."""


def public() -> dict[str, Any]:
    found = {name: getattr(rec_sdk_torch, name) for name in rec_sdk_torch.__all__}
    for name in OTHERS:
        module, _, attribute = name.partition(".")
        found[name] = getattr(getattr(rec_sdk_torch, module), attribute)
    return found


PUBLIC = public()
CLASSES = [name for name, thing in PUBLIC.items() if inspect.isclass(thing)]
CALLS = [name for name, thing in PUBLIC.items() if not (inspect.isclass(thing) and issubclass(thing, enum.Enum))]


def documented(thing: Any) -> str:
    """The docstrings of a function, or of a class and its constructors, also of a class that it refers to."""
    texts = [inspect.getdoc(thing) or ""]
    if inspect.isclass(thing):
        texts += [base.__doc__ or "" for base in thing.__mro__ if base.__module__.startswith("rec_sdk_torch")]
        texts += [getattr(base.__init__, "__doc__", None) or "" for base in thing.__mro__]
        texts += [
            documented(PUBLIC[name]) for name in re.findall(r"(?:fields|arguments) are those of `(\w+)`", texts[0])
        ]
    return "\n".join(texts)


def described(text: str) -> set[str]:
    """Names before a colon at the beginning of a line, several with commas."""
    lists = re.findall(r"^ *([\w, *]+): \S", text, re.MULTILINE)
    return {word for names in lists for word in re.findall(r"\w+", names)}


@pytest.mark.parametrize("name", PUBLIC)
def test_it_is_on_one_page(name: str) -> None:
    directive = re.compile(rf"^\.\. auto\w+:: rec_sdk_torch\.{re.escape(name)}$", re.MULTILINE)
    pages = [page.name for page in API.glob("*.md") for _ in directive.findall(page.read_text())]
    assert len(pages) == 1, f"{name} is on {pages or 'no page'} of docs/api"


def test_every_module_is_listed() -> None:
    stub = ast.parse((ROOT / "rec_sdk_torch/__init__.pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom) and node.module is None]
    page = (API / "modules.md").read_text()
    assert [alias.name for node in imports for alias in node.names if f"`rec_sdk_torch.{alias.name}`" not in page] == []


@pytest.mark.parametrize("name", CALLS)
def test_every_argument_has_a_description(name: str) -> None:
    thing = PUBLIC[name]
    if name in OF_THE_ENGINE or (inspect.isclass(thing) and issubclass(thing, Exception)):
        return
    signature = inspect.signature(thing.__init__ if inspect.isclass(thing) else thing)
    given = [each for each in signature.parameters if each != "self" and not each.startswith("_")]
    known = described(documented(thing)) | set(_WITHOUT_EFFECT)
    assert [each for each in given if each not in known] == []


WITHOUT_EXAMPLES = OF_THE_ENGINE | {name for name in CLASSES if issubclass(PUBLIC[name], Warning)}


@pytest.mark.parametrize("name", [name for name in CLASSES if name not in WITHOUT_EXAMPLES])
def test_every_class_has_an_example(name: str) -> None:
    assert ">>> " in (PUBLIC[name].__doc__ or ""), f"{name} has no example"


@pytest.mark.parametrize("name", PUBLIC)
def test_examples_run(name: str) -> None:
    finder = doctest.DocTestFinder(recurse=False)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    said: list[str] = []
    for example in finder.find(PUBLIC[name], name, globs={}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runner.run(example, out=said.append)
    assert not runner.failures, "".join(said)


def is_described(name: str, value: Any) -> bool:
    """Not by a base class, nor by what dataclasses write."""
    text = (vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__) or ""
    return bool(text.strip()) and not text.startswith(f"{name.rpartition('.')[2]}(")


def shown(module: Any) -> dict[str, Any]:
    """Classes and functions of ours that a module shows, and the methods of its classes."""
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    found = {name: getattr(module, name) for name in names}
    found = {name: each for name, each in found.items() if inspect.isclass(each) or inspect.isroutine(each)}
    found = {
        name: each for name, each in found.items() if str(getattr(each, "__module__", "")).startswith("rec_sdk_torch")
    }
    for cls_name, cls in list(found.items()):
        for name, value in vars(cls).items() if inspect.isclass(cls) else ():
            method = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            torchs = name in {"forward", "extra_repr"} or name in getattr(cls, "__dataclass_fields__", {})
            if inspect.isfunction(method) and not (name.startswith("_") or torchs):
                found[f"{cls_name}.{name}"] = method
    return found


@pytest.mark.parametrize("module", ["", ".checkpoint", ".export", ".fbgemm", ".ops", ".serving", ".tbe"])
def test_what_modules_show_is_described(module: str) -> None:
    """But for compat, which changes torch when it is imported."""
    found = importlib.import_module(f"rec_sdk_torch{module}")
    assert found.__doc__
    assert len(shown(found)) > {"": 40, ".export": 0, ".fbgemm": 0, ".tbe": 0}.get(module, -1)
    assert [name for name, value in shown(found).items() if not is_described(name, value)] == []
