"""Comments, docstrings and pages are plain sentences, as far as a machine can tell: first words and pronouns."""

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

FIRST = re.compile(r"(?:^|(?<=\. ))(Of|What|Whose|Those)\b")
"""The first word of a sentence that is none, or that hides its subject."""
PERSON = re.compile(r"\b(who|whom|whoever|nobody|somebody|everybody|anybody|he)\b", re.IGNORECASE)
"""Words for people, which code is not."""
CPP_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//(?P<line>[^\n]*)|/\*(?P<block>.*?)\*/', re.DOTALL)
FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)

Text = tuple[int, str]
"""The line where a docstring, a comment or a paragraph begins, and its words."""


def in_chinese(path: Path) -> bool:
    """Such pages have no English sentences; tests/test_chinese.py compares them with their twins."""
    return path.name.endswith(".zh-CN.md") or path.relative_to(ROOT).parts[:2] == ("docs", "zh")


@cache
def files() -> list[Path]:
    """All files of the repository but those that a build has made, and pages in Chinese."""
    inside = [path for room in ROOMS for path in (ROOT / room).rglob("*")]
    kept = [path for path in inside if path.is_file() and "build" not in path.relative_to(ROOT).parts]
    found = [*(path for path in ROOT.iterdir() if path.is_file()), *kept]
    return sorted(path for path in found if not in_chinese(path))


def blocks(comments: list[tuple[int, bool, str]]) -> Iterator[Text]:
    """Comments of whole lines that follow each other are one text; each behind code is a text of its own.

    Args:
        comments: line, whether nothing else is in the line, words.
    """
    last = -1
    begin, words = 0, ""
    for line, alone, said in comments:
        if alone and line == last + 1:
            words += f" {said}"
        else:
            yield begin, words
            begin, words = line, said
        last = line if alone else -1
    yield begin, words


def python_texts(source: str) -> Iterator[Text]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    yield from blocks([(t.start[0], t.line.lstrip().startswith("#"), t.string.lstrip("#:")) for t in comments])


def cpp_texts(source: str) -> Iterator[Text]:
    comments = []
    for match in CPP_COMMENT.finditer(source):
        said = match["line"] if match["block"] is None else match["block"]
        if said is not None:
            line = source.count("\n", 0, match.start()) + 1
            before = source[source.rfind("\n", 0, match.start()) + 1 : match.start()]
            comments.append((line, not before.strip(), said))
    yield from blocks(comments)


def script_texts(source: str) -> Iterator[Text]:
    lines = enumerate(source.splitlines(), start=1)
    yield from blocks([(n, True, line.lstrip("# ")) for n, line in lines if line.lstrip().startswith("#")])


def page_texts(source: str) -> Iterator[Text]:
    """Paragraphs, items of lists and lines of tables; not what a page quotes from code."""
    text = FENCED.sub(lambda match: "\n" * match.group().count("\n"), source)
    for match in re.finditer(r"^(?:[-*|] |\d+\. )?.+(?:\n(?![-*|] |\d+\. |#)\S.*|\n {2,}\S.*)*", text, re.MULTILINE):
        words = re.sub(r"`[^`]*`", "`code`", match.group())
        yield text.count("\n", 0, match.start()) + 1, re.sub(r"^([-*|]|\d+\.) |\*\*", "", words)


def texts(path: Path) -> Iterator[Text]:
    readers = [(PYTHON, python_texts), (CPP, cpp_texts), (SCRIPTS, script_texts), ({".md"}, page_texts)]
    for kinds, reader in readers:
        if path.suffix in kinds or path.name in kinds:
            yield from reader(path.read_text())


def faults(path: Path) -> list[str]:
    found = []
    for line, text in texts(path):
        words = " ".join(text.split())
        heading = path.suffix == ".md" and (words.startswith("#") or words.lower().startswith("what |"))
        for match in [] if heading else FIRST.finditer(words):
            sentence = words[match.start() : match.start() + 60]
            found.append(f"{path.relative_to(ROOT)}:{line}: begins with {match[1]!r}: {sentence!r}")
        for match in PERSON.finditer(text):
            at = line + text.count("\n", 0, match.start())
            found.append(f"{path.relative_to(ROOT)}:{at}: {match.group()!r} is a word for people")
    return found


@pytest.mark.parametrize("room", [*ROOMS, "."])
def test_sentences_begin_with_their_subject_and_name_no_persons(room: str) -> None:
    here = [
        path for path in files() if path.relative_to(ROOT).parts[0] == room or (room == "." and path.parent == ROOT)
    ]
    assert [fault for path in here for fault in faults(path)] == []


@pytest.mark.parametrize(
    ("suffix", "source", "words"),
    [
        (".py", 'x = 1\n"""Of a row."""\n', "begins with 'Of'"),
        (".py", "# a text of two lines,\n# which nobody reads\n", "'nobody' is a word for people"),
        (".py", "# a text\n\n# Those of a table\n", "begins with 'Those'"),
        (".py", "f()  # a call\ng()  # Whose result is thrown away\n", "begins with 'Whose'"),
        (".cpp", 'f("//");  // who reads\n', "'who' is a word for people"),
        (".h", "// A sentence\n// What follows is part of it.\n\n/* What is not */\n", "begins with 'What'"),
        (".cmake", "# Whoever builds it\n", "'Whoever' is a word for people"),
        (".py", 'def f():\n    """Gives rows. Those of\n    a table come first."""\n', "begins with 'Those'"),
        (".md", "# What works\n\n- Of rows\n", "begins with 'Of'"),
        (".md", "A line\nthat somebody wrote\n", "'somebody' is a word for people"),
    ],
)
def test_faults_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, source: str, words: str) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / f"it{suffix}"
    path.write_text(source)
    (fault,) = faults(path)
    assert words in fault
