"""Warnings have categories of this package, which docs/faq.md lists; loggers have module names; exceptions have
docstrings.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from embeddings import embedding_of, train

import rec_sdk_torch as rst
from rec_sdk_torch.runtime.warn import RecSdkWarning
from rec_sdk_torch.tbe import TableBatchedEmbedding, TableConfig

Node = TypeVar("Node", bound=ast.AST)
ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "rec_sdk_torch"
FILES = sorted(PACKAGE.rglob("*.py"))
NATIVE = [path for room in ("torch_npu_ext", "op_kernels", "emulator") for path in (ROOT / room).rglob("*.[ch]*")]
CATEGORIES = {each.__name__ for each in RecSdkWarning.__subclasses__()}

TREES = {path: ast.parse(path.read_text()) for path in FILES}

PASSED_ON = {"monitor.py", "dedup.py"}
"""Files that issue warnings whose text is created in another file; only words in the file itself are known."""


def nodes(kind: type[Node]) -> Iterator[tuple[Path, Node]]:
    """Yields each AST node of a given kind in the package's source."""
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, kind):
                yield path, node


def calls() -> Iterator[tuple[Path, ast.Call]]:
    """Returns the AST node of each `warn(...)` call in the package."""
    return (
        (path, node) for path, node in nodes(ast.Call) if isinstance(node.func, ast.Name) and node.func.id == "warn"
    )


def words(node: ast.AST) -> str:
    """Joins the string constants below an AST node, in source order."""
    parts = [each for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return "|".join(str(each.value) for each in sorted(parts, key=lambda each: (each.lineno, each.col_offset)))


def documented() -> list[tuple[str, str]]:
    """Returns category and text of each row in the page's table of warnings."""
    page = (ROOT / "docs" / "faq.md").read_text()
    return re.findall(r'^\| `(\w+Warning)` \| "([^"]+)" \|', page, re.MULTILINE)


def test_every_call_names_a_category() -> None:
    found = [(path, node.args[1] if len(node.args) == 2 else None) for path, node in calls()]
    assert len(found) > 30
    assert [
        f"{path.name}:{category and category.lineno}"
        for path, category in found
        if not (isinstance(category, ast.Name) and category.id in CATEGORIES)
    ] == []


def test_warnings_only_use_our_function() -> None:
    other = re.compile(r"\bwarnings\.warn|\bwarn_explicit|PyErr_Warn|TORCH_WARN|\bimport .*\bwarnings\b.*\bas\b")
    used = [path.name for path in [*FILES, *NATIVE] if other.search(path.read_text())]
    assert used == ["warn.py"]


def test_the_page_lists_every_warning() -> None:
    lines = documented()
    assert {category for category, _ in lines} == CATEGORIES
    missing = []
    for path, node in calls():
        text = words(TREES[path] if path.name in PASSED_ON else node.args[0])
        category = ast.unparse(node.args[1])
        if not any(kind == category and phrase in text.replace("|", "") for kind, phrase in lines):
            missing.append(f"{path.name}:{node.lineno}: {category}: {text}")
    assert missing == []


def test_every_listed_warning_is_there() -> None:
    everything = "".join(words(tree).replace("|", "") for tree in TREES.values())
    assert [phrase for _, phrase in documented() if phrase not in everything] == []


def test_categories_are_public_and_explained() -> None:
    page = (ROOT / "docs" / "faq.md").read_text()
    for name in {*CATEGORIES, "RecSdkWarning"}:
        category = getattr(rst, name)
        assert issubclass(category, UserWarning)
        assert category.__doc__
        assert f"`{name}`" in page


def index_table(device: torch.device, **options: Any) -> TableBatchedEmbedding:
    return embedding_of(TableConfig("t", 100, 4, hashed=False), device=device, **options)


def out_of_range(device: torch.device) -> None:
    index_table(device)(torch.tensor([1000]), torch.tensor([0, 1]))


def one_row(device: torch.device) -> None:
    index_table(device, cache=1)


def not_finite(device: torch.device) -> None:
    table = index_table(device, check_finite="warn")
    (table(torch.tensor([1]), torch.tensor([0, 1])) * float("nan")).sum().backward()


def small_cache(device: torch.device) -> None:
    train(index_table(device, cache=3), *(range(step, step + 3) for step in range(80)))


def another_size(device: torch.device) -> None:
    table = index_table(device)
    table.load_state_dict({name: value[:50] for name, value in table.state_dict().items()})


EXAMPLES: dict[str, Callable[[torch.device], None]] = {
    "InputWarning": out_of_range,
    "ConfigurationWarning": one_row,
    "TrainingWarning": not_finite,
    "PerformanceWarning": small_cache,
    "SaveWarning": another_size,
}


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_a_category_can_be_silenced_and_raised(name: str, device: torch.device) -> None:
    category = getattr(rst, name)
    with pytest.warns(category) as seen:
        EXAMPLES[name](device)
    assert {type(each.message) for each in seen if issubclass(each.category, RecSdkWarning)} == {category}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=category)
        EXAMPLES[name](device)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=category)
        with pytest.raises(category):
            EXAMPLES[name](device)


LOGGERS = {"saver": "'rec_sdk_torch.checkpoint'", "table_reader": "'rec_sdk_torch.serving'"}
"""Names of loggers in modules that users import by another path."""


def test_loggers_have_the_names_of_modules() -> None:
    for path, node in nodes(ast.Call):
        if ast.unparse(node.func).endswith("getLogger"):
            assert ast.unparse(node) == f"logging.getLogger({LOGGERS.get(path.stem, '__name__')})", path


def test_saves_and_loads_are_logged(tmp_path: Path, device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    table = index_table(device)
    with caplog.at_level(logging.INFO, "rec_sdk_torch"):
        folder = rst.Saver().save(table, tmp_path)
        rst.Saver().save(table, tmp_path, background=True).result()
        rst.Saver().load(table, folder)
    lines = [record.getMessage() for record in caplog.records if record.name == "rec_sdk_torch.checkpoint"]
    assert [line.split()[0] for line in lines] == ["saved", "saved", "loaded"]
    assert lines[2] == f"loaded {folder}"


def errors() -> Iterator[tuple[str, str]]:
    """Yields the module and name of each exception class in the package."""
    for path, node in nodes(ast.ClassDef):
        if any(ast.unparse(base).endswith(("Error", "Exception", "Warning")) for base in node.bases):
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts), node.name


def test_exception_classes_have_docstrings() -> None:
    found = [*errors(), ("rec_sdk_torch.tbe", "CacheTooSmallError"), ("rec_sdk_torch.tbe", "CapacityError")]
    assert len(found) > 10
    for module, name in found:
        text = inspect.getdoc(getattr(importlib.import_module(module), name))
        assert text, f"{module}.{name}"
        assert len(text.split()) > 4, f"{module}.{name}"
