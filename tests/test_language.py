"""Sentences of docstrings, comments and pages, as far as a machine can judge them.

The docstring of a function begins with a verb of tests/verbs.txt, the docstring of a class or a property does not. The
phrases that `PRONOUN` matches do not occur. A sentence of a page has at most `LONGEST` words.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ["benchmarks", "cmake", "docs", "emulator", "examples", "op_kernels", "rec_sdk_torch", "tests", "torch_npu_ext"]
PYTHON = {".py", ".pyi"}
CPP = {".cpp", ".h", ".cu", ".asc"}
SCRIPTS = {".cmake", ".toml", ".txt", "Makefile"}

_WORDS = (ROOT / "tests/verbs.txt").read_text().split()
VERBS = {word.rstrip("*") for word in _WORDS}
"""Verbs that may begin docstrings; in the file, `*` marks a verb that is also a plural noun."""
NOT_A_NOUN = {word for word in _WORDS if not word.endswith("*")} | {"As", "It", "Like", "See", "They"}
PRONOUN = re.compile(r"\b(that|those) of\b", re.IGNORECASE)
LONGEST = 35

CPP_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//(?P<line>[^\n]*)|/\*(?P<block>.*?)\*/', re.DOTALL)
FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
PARAGRAPH = re.compile(r"^(?:[-*|] |\d+\. )?.+(?:\n(?![-*|] |\d+\. |#)\S.*|\n {2,}\S.*)*", re.MULTILINE)
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*\[(])")
WORD = re.compile(r"\S*\w\S*")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

Text = tuple[int, str]
"""The line where a docstring, a comment or a paragraph begins, and its words."""


def in_chinese(path: Path) -> bool:
    """Returns whether a page is in Chinese; tests/test_chinese.py compares those with their twins."""
    return path.name.endswith(".zh-CN.md") or path.relative_to(ROOT).parts[:2] == ("docs", "zh")


@cache
def files() -> list[Path]:
    """Lists the files of the repository, except pages in Chinese and build outputs."""
    inside = [path for room in ROOMS for path in (ROOT / room).rglob("*")]
    kept = [path for path in inside if path.is_file() and "build" not in path.relative_to(ROOT).parts]
    found = [*(path for path in ROOT.iterdir() if path.is_file()), *kept]
    return sorted(path for path in found if not in_chinese(path))


def python_texts(source: str) -> Iterator[Text]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def cpp_texts(source: str) -> Iterator[Text]:
    for match in CPP_COMMENT.finditer(source):
        words = match["line"] if match["block"] is None else match["block"]
        if words is not None:
            yield source.count("\n", 0, match.start()) + 1, words


def script_texts(source: str) -> Iterator[Text]:
    for number, line in enumerate(source.splitlines(), start=1):
        if line.lstrip().startswith("#"):
            yield number, line


def page_texts(source: str) -> Iterator[Text]:
    """Yields paragraphs, list items and table rows, without fenced code."""
    text = FENCED.sub(lambda match: "\n" * match.group().count("\n"), source)
    for match in PARAGRAPH.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, match.group()


def texts(path: Path) -> Iterator[Text]:
    readers = [(PYTHON, python_texts), (CPP, cpp_texts), (SCRIPTS, script_texts), ({".md"}, page_texts)]
    for kinds, reader in readers:
        if path.suffix in kinds or path.name in kinds:
            yield from reader(path.read_text())


def is_property(node: Definition) -> bool:
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    return any(name.endswith(("property", ".getter", ".setter")) for name in decorators)


def wrong_first_words(source: str) -> Iterator[Text]:
    """Yields docstrings of functions that do not begin with a verb, and docstrings of classes and properties
    that do.
    """
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, Definition):
            continue
        first = re.match(r"\W*([^\s.,:;]+)", ast.get_docstring(node) or "")
        if first is None or (node.name.startswith("test_") and not isinstance(node, ast.ClassDef)):
            continue
        noun_wanted = isinstance(node, ast.ClassDef) or is_property(node)
        if noun_wanted and first[1] in NOT_A_NOUN:
            yield node.lineno, f"{node.name}: its docstring begins with {first[1]!r}, not with a noun"
        elif not noun_wanted and first[1] not in VERBS:
            yield (
                node.lineno,
                f"{node.name}: its docstring begins with {first[1]!r}, no verb of tests/verbs.txt",
            )


def long_sentences(source: str) -> Iterator[Text]:
    for line, text in page_texts(source):
        if text.startswith(("|", "#")):
            continue
        words = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "`code`", text))
        for sentence in SENTENCE_END.split(" ".join(words.split())):
            count = len(WORD.findall(sentence))
            if count > LONGEST:
                yield line, f"a sentence of {count} words: {sentence[:60]!r}"


def faults(path: Path) -> list[str]:
    found = []
    if path.suffix in PYTHON:
        found += wrong_first_words(path.read_text())
    if path.suffix == ".md" and path.name != "CHANGELOG.md":
        found += long_sentences(path.read_text())
    for line, text in texts(path):
        for match in PRONOUN.finditer(text):
            at = line + text.count("\n", 0, match.start())
            found.append((at, f"{match.group()!r} stands for a noun: {text[match.start() - 20 : match.end() + 20]!r}"))
    return [f"{path.relative_to(ROOT)}:{line}: {fault}" for line, fault in found]


@pytest.mark.parametrize("room", [*ROOMS, "."])
def test_sentences(room: str) -> None:
    here = [
        path for path in files() if path.relative_to(ROOT).parts[0] == room or (room == "." and path.parent == ROOT)
    ]
    assert [fault for path in here for fault in faults(path)] == []


@pytest.mark.parametrize(
    ("suffix", "source", "words"),
    [
        (".py", 'def f():\n    """The rows of a table."""\n', "begins with 'The', no verb of"),
        (".py", 'async def f():\n    """As for a table."""\n', "begins with 'As', no verb of"),
        (".py", 'class A:\n    """Returns rows."""\n', "begins with 'Returns', not with a noun"),
        (".py", 'class A:\n    @property\n    def f(self):\n        """Computes rows."""\n', "not with a noun"),
        (".py", 'def f():\n    """Returns rows, those\n    of a table too."""\n', ""),
        (".py", "# a text of two lines,\n# like that of a table\n", "'that of' stands for a noun"),
        (".py", "f()  # those of a call\n", "'those of' stands for a noun"),
        (".cpp", 'f("//");  // that of a row\n', "'that of' stands for a noun"),
        (".h", "/* A row,\n   and that of others */\n", "'that of' stands for a noun"),
        (".cmake", "# like those of CMake\n", "'those of' stands for a noun"),
        (".md", f"{'One ' * 36}sentence.\n", "a sentence of 37 words"),
        (".md", "- Rows,\n  also those of others.\n", "'those of' stands for a noun"),
    ],
)
def test_faults_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, source: str, words: str) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / f"it{suffix}"
    path.write_text(source)
    found = faults(path)
    assert (len(found), words in found[0]) == (1, True) if words else found == []


def test_test_functions_may_state_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "it.py"
    path.write_text('def test_rows():\n    """Rows are there."""\n')
    assert faults(path) == []
