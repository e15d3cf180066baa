"""Chinese pages match their English twins: headings, lists, code, tables, names, numbers, links.

No program can decide whether two sentences mean the same, so the tests compare what must be equal in both languages.
A change of only one of the pages is reported, unless it changes only words.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parent.parent
INDEX = "docs/zh/index.md"
"""The list of all pages. It has no English twin, and lists the pages that exist in English only."""

FENCE = re.compile(r" *```(.*)")
HEADING = re.compile(r"(#{1,6}) (.*)")
ITEM = re.compile(r"^ *(?:[-*]|\d+\.) ", re.MULTILINE)
LINK = re.compile(r"\[[^]]+\]\(([^)]+)\)")
QUOTED = re.compile(r"`([^`]+)`")
PLAIN = re.compile(r"[\d.,%]+(?: [A-Za-z]+)?")
"""A cell of a table that needs no translation: a number, and perhaps its unit."""
NUMBER = re.compile(r"(?<![\w.^])(\d[\d,]*(?:\.\d+)?(?:e-?\d+)?)(?: *(thousand|million|万|亿))?")
TIMES = {"": 1, "thousand": 1e3, "million": 1e6, "万": 1e4, "亿": 1e8}
COMMENTS = dict.fromkeys(["", "bash", "cmake", "python", "yaml"], r"(?:^|\s+)#.*") | {"cpp": r"\s*//.*"}
"""The form of a comment in each language of code blocks. Blocks in other languages must equal their English twins."""
PROMISE = re.compile(r" *print\(.*\)  # ")
"""A line of code with its output in a comment."""
WIDE = r"[\u3000-\u9fff\uff00-\uffef]"
HALF_WIDTH = re.compile(rf"(?<={WIDE})[,.:;?!()]|[,.:;?!()](?={WIDE})")
"""A half-width mark next to a Chinese character or a full-width mark."""


@dataclass
class Section:
    """The text between one heading and the next."""

    level: int
    title: str
    blocks: list[tuple[str, list[str]]] = field(default_factory=list)
    """Fenced blocks: what stands behind the opening fence, the lines inside."""
    tables: list[list[list[str]]] = field(default_factory=list)
    """Rows of cells."""
    prose: str = ""


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def read(page: Path) -> list[Section]:
    found = [Section(0, "")]
    block: list[str] | None = None
    before = ""
    for line in page.read_text().splitlines():
        here = found[-1]
        if fence := FENCE.fullmatch(line):
            if block is None:
                block = []
                here.blocks.append((fence[1], block))
            else:
                block = None
        elif block is not None:
            block.append(line)
        elif heading := HEADING.fullmatch(line):
            found.append(Section(len(heading[1]), heading[2]))
        elif line.startswith("|"):
            if not before.startswith("|"):
                here.tables.append([])
            here.tables[-1].append(cells(line))
        else:
            here.prose += line + "\n"
        before = line
    return found


@cache
def anchors(page: Path) -> list[str]:
    """Lists the anchors of a page's headings as the site and repository viewers make them, in order."""
    titles = [section.title for section in read(page)]
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def in_english(page: str) -> str:
    """Returns the path of the page's English twin, or its own path if it has none."""
    if page == INDEX:
        return page
    for chinese, english in (("README.zh-CN.md", "README.md"), ("docs/zh/", "docs/"), (".zh.svg", ".svg")):
        page = page.replace(chinese, english)
    return page


def target(page: Path, link: str) -> tuple[str, int | str]:
    """Returns (English page, index of the heading) for a link; links of both languages have the same result."""
    if link.startswith("https://"):
        return link, 0
    path, _, anchor = link.partition("#")
    file = Path(os.path.normpath(page.parent / path)) if path else page
    known = anchors(file) if file.suffix == ".md" and file.is_file() else []
    return in_english(name(file)), known.index(anchor) if anchor in known else anchor


def names(text: str) -> list[str]:
    return sorted({" ".join(quoted.split()) for quoted in QUOTED.findall(text)})


def words(section: Section) -> str:
    """Returns the section's prose and table cells."""
    return "\n".join([section.prose, *(cell for table in section.tables for row in table for cell in row)])


def numbers(page: Path, section: Section) -> list[float]:
    """Lists the numbers in digits, outside of code and links."""
    text = re.sub(r"\]\([^)]*\)", "]", QUOTED.sub("", ITEM.sub("", words(section))))
    return sorted({float(digits.replace(",", "")) * TIMES[times] for digits, times in NUMBER.findall(text)})


def links(page: Path, section: Section) -> list[tuple[str, int | str]]:
    found = [target(page, link) for link in LINK.findall(words(section))]
    return sorted((link for link in found if link[0] != INDEX), key=str)  # sentences may be ordered differently


def code(page: Path, section: Section) -> list[tuple[str, list[str]]]:
    found = []
    for kind, lines in section.blocks:
        comment = COMMENTS.get(kind)
        directive, _, path = kind.partition("} ")  # a path is relative to the page
        label = f"{directive}}} {name(Path(os.path.normpath(page.parent / path)))}" if path else kind
        if not kind.startswith("{toctree}"):  # each language has its own table of contents
            bare = [re.sub(comment, "", line) if comment and not PROMISE.match(line) else line for line in lines]
            bare = [re.sub(r"^(:diff: )(?:\.\./)+", r"\1", line) for line in bare]
            found.append((label, [line for line in bare if line.strip()]))
    return found


def tables(page: Path, section: Section) -> list[list[str]]:
    """Returns the rows of all tables; a cell is reduced to its quoted names, or unchanged if it is a plain number."""

    def kept(cell: str) -> str:
        return cell if PLAIN.fullmatch(cell) else " ".join(names(cell))

    return [[kept(cell) for cell in row] for table in section.tables for row in table]


def drawn(drawing: Path) -> list[tuple[str, dict[str, str], str]]:
    """Returns the tag, the attributes and the text of each element of an SVG."""
    tree = ElementTree.fromstring(drawing.read_text())
    return [(each.tag.rpartition("}")[2], each.attrib, each.text or "") for each in tree.iter()]


SAME: dict[str, Callable[[Path, Section], object]] = {
    "code blocks": code,
    "tables": tables,
    "number of list items": lambda page, section: len(ITEM.findall(section.prose)),
    "names in code quotes": lambda page, section: names(section.prose),
    "numbers": numbers,
    "links": links,
}


def half_width(page: Path) -> list[str]:
    """Returns the half-width marks beside Chinese characters, each with the text around it.

    Inline code is skipped to find neighbours, so "缓存 `x`,`y` 等" has one such mark. Comments in code blocks are
    included.
    """
    found = []
    for section in read(page):
        lines = [section.title, *words(section).splitlines()]
        for kind, block in section.blocks:
            lines += [line[len(re.sub(COMMENTS.get(kind, "$^"), "", line)) :] for line in block]
        for line in lines:
            text = re.sub(r"!(?=\[)|(?<=\])\([^)]*\)|https?://[\w./#-]+", "", ITEM.sub("", line))
            text = re.sub(r"\s*`[^`]+`\s*|[*\[\]]", "", text)
            found += [text[max(0, mark.start() - 10) : mark.end() + 10] for mark in HALF_WIDTH.finditer(text)]
    return found


def alone(some: object, others: object) -> object:
    """Returns, for a message, the items that the other side lacks, or all items if only number or order differ."""
    if isinstance(some, list) and isinstance(others, list):
        return [item for item in some if item not in others] or some
    return some


def differences(english: Path, chinese: Path) -> list[str]:
    """Describes each difference in one sentence."""
    pair = f"{name(chinese)} and {name(english)}"
    here, there = read(english), read(chinese)
    for first, second in zip(here, there, strict=False):
        if first.level != second.level:
            titles = f"{first.title!r} and {second.title!r}"
            return [f"{pair}: headings {titles} are of levels {first.level}, {second.level}"]
    if len(here) != len(there):
        return [f"{pair}: {len(here) - 1} headings in English, {len(there) - 1} in Chinese"]
    found = []
    for first, second in zip(here, there, strict=True):
        for what, of in SAME.items():
            ours, theirs = of(english, first), of(chinese, second)
            if ours != theirs:
                each = f"  English: {alone(ours, theirs)}\n  Chinese: {alone(theirs, ours)}"
                found.append(f"{pair}, section {first.title!r}: {what} differ:\n{each}")
    return found


CHINESE = sorted([ROOT / "README.zh-CN.md", *(ROOT / "docs/zh").rglob("*.md")])
TWINS = [page for page in CHINESE if name(page) != INDEX]


@pytest.mark.parametrize("page", TWINS, ids=name)
def test_a_page_matches_its_english_twin(page: Path) -> None:
    english = ROOT / in_english(name(page))
    assert english.exists(), f"{name(page)} has no English twin"
    found = differences(english, page)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", CHINESE, ids=name)
def test_links_lead_to_chinese_pages_where_they_exist(page: Path) -> None:
    translated = {in_english(name(twin)) for twin in TWINS}
    for link in LINK.findall(page.read_text()):
        path = link.partition("#")[0]
        file = os.path.relpath(os.path.normpath(page.parent / path), ROOT)
        if path and file in translated and file != in_english(name(page)):
            assert name(page) == INDEX, f"{name(page)} links to {link}, which is there in Chinese"


@pytest.mark.parametrize("page", TWINS, ids=name)
def test_twins_link_to_each_other(page: Path) -> None:
    english = ROOT / in_english(name(page))
    for one, other, word in ((page, english, "English"), (english, page, "中文")):
        assert f"[{word}]({os.path.relpath(other, one.parent)})" in one.read_text(), f"{name(one)}: no link"


@pytest.mark.parametrize("page", CHINESE, ids=name)
def test_punctuation_beside_chinese_characters_is_full_width(page: Path) -> None:
    assert half_width(page) == []


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("# 行,列", 1),
        ("1. 设置 `x`,`y` 之一(共 1,000 行),见[页](a.md)。", 4),
        ("| 单元: | 1.5 |", 1),
        ("```python\nx = (1, 2)  # 一.\n```", 1),
        ("1. 设置 `x(1, 2)`，见 [torch.optim](a,b.md)（1.5、2,000）。", 0),
        ("![图](a.svg)", 0),
    ],
)
def test_half_width_marks_are_found(tmp_path: Path, line: str, number: int) -> None:
    page = tmp_path / "page.md"
    page.write_text(line)
    assert len(half_width(page)) == number


@pytest.mark.parametrize("page", CHINESE, ids=name)
def test_drawings_match_the_english_twin_with_chinese_labels(page: Path) -> None:
    for link in re.findall(r"!\[[^]]*\]\(([^)]+\.svg)\)", page.read_text()):
        chinese = ROOT / os.path.normpath(page.parent / link)
        english = ROOT / in_english(name(chinese))
        assert chinese != english, f"{name(page)} shows {link}, whose labels are English"
        shapes = [[(tag, sorted(of.items())) for tag, of, _ in drawn(drawing)][1:] for drawing in (chinese, english)]
        assert shapes[0] == shapes[1], f"{name(chinese)} and {name(english)} have other shapes"
        labels = [text for tag, _, text in drawn(chinese) if tag in {"title", "desc", "text"}]
        assert [text for text in labels if not re.search("[\u4e00-\u9fff]", text)] == []


def test_the_index_has_every_page() -> None:
    """The index lists each page in Chinese if it exists, else in English with a note."""
    listed = {os.path.normpath(f"docs/zh/{link}") for link in LINK.findall((ROOT / INDEX).read_text())}
    pages = {name(page) for page in [*TWINS, *(ROOT / "docs").glob("*.md")]} - {"docs/index.md"}
    translated = {in_english(name(page)) for page in TWINS}
    assert pages - translated - listed == set()
    assert listed & translated == set()


BEFORE = """# Sizes

| `cache` | 5 |
|---|---|
| `rows` | some |

Give `cache=`, for 2 million ids; see [rows](page.md#rows):

```python
x = 1  # a number
print(x)  # 1
```

## Rows

- One.
"""
AFTER = """# 大小

| `cache` | 5 |
|---|---|
| `rows` | 若干 |

设置 `cache=`，适用于 200 万个 id；参见[行](page.md#行)：

```python
x = 1  # 一个数
print(x)  # 1
```

## 行

- 一。
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("- 一。", "- 一。", ""),
        ("## 行", "### 行", "are of levels 2, 3"),
        ("- 一。", "## 又一", "2 headings in English, 3 in Chinese"),
        ("x = 1", "x = 2", "code blocks differ"),
        ("print(x)  # 1", "print(x)  # 2", "code blocks differ"),
        ("| 5 |", "| 6 |", "tables differ"),
        ("| 若干 |", "| 若干 | 列 |", "tables differ"),
        ("| `rows` | 若干 |\n", "", "tables differ"),
        ("| `rows` |", "| `row` |", "tables differ"),
        ("- 一。", "- 一。\n- 二。", "number of list items differ"),
        ("`cache=`", "`caches=`", "names in code quotes differ"),
        ("200 万", "20 万", "numbers differ"),
        ("page.md#行", "page.md#大小", "links differ"),
        ("page.md#行", "page.md", "links differ"),
    ],
)
def test_differences_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, said: str
) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    english, chinese = tmp_path / "docs/page.md", tmp_path / "docs/zh/page.md"
    chinese.parent.mkdir(parents=True)
    english.write_text(BEFORE)
    assert AFTER.count(old) == 1
    chinese.write_text(AFTER.replace(old, new))
    found = differences(english, chinese)
    assert (said in found[0]) if said else (found == [])


@pytest.fixture(name="site")
def imported_site(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Imports the part of the site's build that handles Chinese; this part does not need Sphinx."""
    monkeypatch.syspath_prepend(ROOT / "docs/_site")
    return importlib.import_module("chinese")


QUERIES = {
    "缓存": ["缓存"],
    "行": ["行"],
    "设备内存": ["设备", "备内", "内存"],
    "NPU内存 float16_t": ["NPU", "内存", "float16_t"],
    "cache_sizes=, 分表。": ["cache_sizes", "分表"],
}
"""Search queries, and the terms that a page must contain to be found."""


def test_words_of_two_characters_are_search_terms(site: ModuleType) -> None:
    terms = site.split("全部行在主机内存中，NPU内存只作缓存：cache_sizes=0.1，float16_t，分表设备内存")
    assert {term for query in QUERIES.values() for term in query} <= set(terms)
    assert "全部行在主机内存中" not in terms


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_queries_are_split_into_search_terms(site: ModuleType) -> None:
    script = f"{site.SPLIT_QUERY}; console.log(JSON.stringify({json.dumps([*QUERIES])}.map(splitQuery)))"
    output = subprocess.run(["node", "-e", script], check=True, capture_output=True, text=True).stdout
    assert json.loads(output) == [*QUERIES.values()]


def test_side_bar_has_the_language_of_the_page(site: ModuleType) -> None:
    tree = '<p class="caption">Start</p><ul><li>安装</li></ul><p class="caption">开始</p><ul><li>Adam</li></ul>'
    for chinese, kept, dropped, link in ((True, "Adam", "安装", "English"), (False, "安装", "Adam", "中文文档")):
        side_bar = site.side_bar(tree, chinese, "other.html")
        assert kept in side_bar
        assert dropped not in side_bar
        assert f'href="other.html">{link}<' in side_bar


def test_pages_have_a_language(site: ModuleType) -> None:
    assert all(site.is_chinese(name(page).removesuffix(".md")) for page in CHINESE)
    assert not any(site.is_chinese(in_english(name(page)).removesuffix(".md")) for page in TWINS)
