"""The documentation's Python code runs and prints what the pages show; links, paths and commands exist."""

from __future__ import annotations

import ast
import gc
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
READMES = ["benchmarks", "emulator", "examples", "tests", "tests/plants"]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^]]+\]\(([^)]+)\)")
PATH = re.compile(r"`([\w./*-]+/[\w.*-]+)`")
PROMISE = re.compile(r"print\(.*\)  # (.*)$")
PLACEHOLDER = re.compile(r"my_|xyz")
ITEM = re.compile(r"\n\s*\n|\n(?= *(?:[-*]|\d+\.) )")
"""The end of a paragraph or of an item of a list."""
LINES, WORDS = 250, 120
"""The largest numbers of lines of a page and words of a paragraph; tables may be longer."""
LONG = {"CHANGELOG"}
"""Pages that may be longer."""
SITE = ROOT / "build" / "docs"
"""The site that `make docs` builds."""
SEARCHES = {
    "checkpoint": "docs/checkpoint.md",
    "elastic": "docs/sharding.md",
    "ftrl": "docs/optimizers.md",
    "prometheus": "docs/profiling.md",
    "s3": "docs/checkpoint.md",
}
"""Words that users search for, and pages that must be found."""
EXAMPLE = "lookup_sequence"
"""An operator with a file in every place where a page has the reader add one for `my_op`."""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[str]:
    """Returns the code blocks of a page, padded with empty lines so that line numbers in tracebacks match the page."""
    text = page.read_text()
    return ["\n" * text[: match.start(1)].count("\n") + match.group(1) for match in BLOCK.finditer(text)]


def run(page: Path) -> list[tuple[str, str]]:
    """Runs a page's blocks in order; returns (expected, printed) for every print call with a comment."""
    lines = page.read_text().splitlines()
    seen: list[tuple[str, str]] = []

    def checked_print(*values: object) -> None:
        promise = PROMISE.search(lines[sys._getframe(1).f_lineno - 1])
        if promise:
            seen.append((promise.group(1), " ".join(map(str, values))))

    namespace: dict[str, Any] = {"print": checked_print}
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), namespace)
    if "init_process_group" in page.read_text():
        namespace.clear()
        gc.collect()  # stops the threads of groups; otherwise a process forked by a later test would hang at exit
    return seen


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page) and "zh" not in name(page)], ids=name)
def test_python_blocks_run_and_print_what_they_show(page: Path) -> None:
    """Only English pages run: tests/test_chinese.py checks that the Chinese pages have the same code."""
    pytest.importorskip("torchrec")
    for promised, printed in run(page):
        assert printed.startswith(promised.removesuffix(" ..."))


def names_of(code: str) -> tuple[set[str], set[str]]:
    """Returns the names that a block of Python assigns or imports, and all others that it reads."""
    nodes = list(ast.walk(ast.parse(code)))
    own = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.name or "" for node in nodes if isinstance(node, ast.ExceptHandler)}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    imports = [alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    own |= {alias.asname or alias.name.partition(".")[0] for alias in imports}
    return own, {node.id for node in nodes if isinstance(node, ast.Name)} - own


@pytest.mark.parametrize("page", [page for page in PAGES if len(blocks(page)) > 1 and "zh" not in name(page)], ids=name)
def test_a_block_that_needs_an_earlier_one_says_so(page: Path) -> None:
    """The paragraph before such a block says that it continues an earlier one, or names what was defined above."""
    before: set[str] = set()
    for block in BLOCK.finditer(page.read_text()):
        own, others = names_of(block[1])
        if others & before:
            lead = page.read_text()[: block.start()].rstrip().rpartition("\n\n")[2]
            assert re.search(r"\bcontinues?\b|\babove\b", lead), f"{sorted(others & before)}: {lead!r}"
        before |= own


@pytest.mark.parametrize("page", [*PAGES, *(ROOT / f"{room}/README.md" for room in READMES)], ids=name)
def test_fences_have_a_language(page: Path) -> None:
    assert "" not in re.findall(r"^ *```(.*)$", page.read_text(), re.MULTILINE)[::2]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "benchmarks" / "README.md"], ids=name)
def test_commands_exist(page: Path) -> None:
    """Every module after `python -m`, and every target after `make`, exists."""
    text = page.read_text()
    for module in re.findall(r"python[0-9.]* -m ((?:benchmarks|rec_sdk_torch|tests)[.a-z_]*[a-z])", text):
        place = ROOT.joinpath(*module.split("."))
        assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), module
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"(?:^|`)make ((?:bench|test|build|sanitize)[a-z0-9-]*)", text, re.MULTILINE):
        assert target in targets, target


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_resolve(page: Path) -> None:
    for target in LINK.findall(FENCED.sub("", page.read_text())):
        if not target.startswith("https://"):
            path = page.parent / target.partition("#")[0]
            assert path.exists(), f"{name(page)} links to {target}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem not in LONG], ids=name)
def test_pages_and_paragraphs_are_short(page: Path) -> None:
    text = page.read_text()
    assert text.count("\n") <= LINES
    for paragraph in ITEM.split(re.sub(r"^\|.*$", "", FENCED.sub("", text), flags=re.MULTILINE)):
        assert len(paragraph.split()) <= WORDS, paragraph


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_paths_exist(page: Path) -> None:
    rooms = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"build"}  # paths that later tests may create
    for path in PATH.findall(FENCED.sub("", page.read_text().replace("my_op", EXAMPLE))):
        if path.split("/")[0] in rooms and not PLACEHOLDER.search(path):
            assert list(ROOT.glob(path)), f"{name(page)} names {path}"


def conf(name: str) -> Any:
    """Returns the value of a constant in docs/conf.py."""
    for node in ast.parse((ROOT / "docs/conf.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise KeyError(name)


def test_former_addresses_lead_to_pages() -> None:
    redirects = conf("redirects")
    assert {"docs/life", "docs/levels", "docs/zh/life"} <= set(redirects)
    for former, now in redirects.items():
        assert not (ROOT / former).with_suffix(".md").exists(), former
        assert (ROOT / former).with_name(now).with_suffix(".md").exists(), now
        if SITE.exists():
            assert f'url={now}"' in (SITE / former).with_suffix(".html").read_text()


@pytest.mark.parametrize("query", SEARCHES)
def test_a_search_finds_the_page_that_answers(query: str) -> None:
    """For each search word, a heading of the page contains it, since the site's search lists headings first."""
    page = SEARCHES[query]
    headings = re.findall(r"^#+ (.*)", (ROOT / page).read_text(), re.MULTILINE)
    assert any(re.search(rf"\b{query}", heading, re.IGNORECASE) for heading in headings), page
    index = SITE / "searchindex.js"
    if index.exists():
        found = json.loads(index.read_text().removeprefix("Search.setIndex(").removesuffix(")"))
        answers = [place for title, places in found["alltitles"].items() if query in title.lower() for place in places]
        assert page.removesuffix(".md") in {found["docnames"][document] for document, _ in answers}


def test_every_environment_variable_is_listed() -> None:
    listed = re.findall(r"^\| `([A-Z_]+)` \|", (ROOT / "docs/settings.md").read_text(), re.MULTILINE)
    source = (ROOT / "rec_sdk_torch/runtime/settings.py").read_text()
    assert sorted(listed) == sorted(re.findall(r"^([A-Z_]+), default", source, re.MULTILINE))


def constant(file: str, pattern: str) -> int:
    found = re.search(pattern, (ROOT / file).read_text())
    assert found, f"{file} has no {pattern}"
    return int(found[1])


def text_of(page: str) -> str:
    """Returns the text of a page without line breaks."""
    return " ".join((ROOT / page).read_text().split())


def test_bytes_of_the_id_map() -> None:
    """docs/memory.md states the bytes per id: the least for a full map, the most for a map that has just grown
    by a quarter.
    """
    header = "torch_npu_ext/engine/directory/id_map.h"
    lanes = constant(header, r"kLanes = (\d+);")
    full = constant(header, r"kLanes \* (\d+) / 25") / 25
    quarter = constant(header, r"buckets_\.count \+ buckets_\.count / (\d+)\);")
    least = 64 / lanes / full
    text = text_of("docs/memory.md")
    assert f"{least:.0f} to {least * (1 + 1 / quarter):.0f} in the id map" in text
    assert f"at a load of {full:.0%} it grows by a quarter" in text
    assert (lanes, quarter) == (5, 4)
    assert "five entries share a cache line" in text


def test_chunks_of_long_segments() -> None:
    cpu = constant("op_kernels/common/arguments.h", r"kChunkLookups = (\d+);")
    cuda = constant("op_kernels/common/arguments.h", r"kHotLookups = (\d+);")
    block = constant("op_kernels/common/ascendc/gradient_sums.h", r"kSumBlock = (\d+);")
    npu = block * constant("op_kernels/common/ascendc/gradient_sums.h", r"kBlocksOfChunk = (\d+);")
    assert f"chunks, of {cpu} lookups on the CPU and of {cuda} on GPUs and NPUs" in text_of("docs/numerics.md")
    assert npu == cuda
    few = constant("op_kernels/common/ascendc/hot_rows.h", r"kLookupsWithoutChunks = (\d+);")
    text = text_of("docs/npu.md")
    assert (
        f"lists the rows with more than {npu} lookups. If there are any, and the batch has more than {few} lookups"
        in text
    )
    assert f"sums these rows in chunks of {npu}" in text


def test_pages_state_the_effects_of_num_embeddings() -> None:
    """README.md states that num_embeddings determines the cache size and the default range of the initial weights."""
    from rec_sdk_torch.tbe import TableConfig

    assert TableConfig("t", 100, 4).init_range != TableConfig("t", 400, 4).init_range
    assert "only sizes the cache" not in text_of("README.md")
    assert "sets the default range of the initial weights" in text_of("README.md")


def test_every_operator_is_documented() -> None:
    """Every operator has its own page, and a line in the table of operators."""
    from rec_sdk_torch.operators.default import KERNELS

    text = (ROOT / "docs/operators.md").read_text()
    for operator in {name.partition(".")[0] for name in KERNELS}:
        assert (ROOT / f"op_kernels/{operator}/README.md").exists(), f"no README of {operator}"
        assert re.search(rf"^\|.*`{operator}\(", text, re.MULTILINE), f"{operator} is not in docs/operators.md"


def test_every_optimizer_is_documented() -> None:
    """Each class is in the table of formulas and in the table of keywords; several classes may share a row."""
    from rec_sdk_torch.formulas import SPECS

    text = (ROOT / "docs/optimizers.md").read_text()
    formulas, keywords = (
        re.findall(r"^\| (.*?) \|", text.partition(f"## {title}\n")[2].partition("\n## ")[0], re.MULTILINE)
        for title in ("Formulas", "Keywords")
    )
    for spec in SPECS:
        if spec.collects_gradients:
            continue
        short = spec.classes[0].rpartition(".")[2]
        assert any(re.search(rf"\b{short}`", row) for row in formulas), f"no formula of {short}"
        named = re.compile(r"Accumulate classes" if spec.accumulates else rf"\b{short}\b")
        assert any(named.search(row) for row in keywords), f"no keywords of {short}"


def messages() -> list[str]:
    """Collects the strings in the sources of the package and the engine, with … for each formatted value."""
    found = []
    for path in (ROOT / "rec_sdk_torch").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(p.value if isinstance(p, ast.Constant) else "…" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    for path in (ROOT / "torch_npu_ext/engine").rglob("*.cpp"):
        source = re.sub(r'"\s*\+[^";]*?\+\s*"', "…", path.read_text())
        found += re.findall(r'"((?:[^"\\\n]|\\.)*)"', re.sub(r'"\s*\n\s*"', "", source))
    return found


def test_every_message_of_the_faq_is_one_of_the_source() -> None:
    """The fixed parts of each message occur, in this order, in one string of the sources."""
    errors = (ROOT / "docs/faq.md").read_text().partition("\n## Warnings\n")[0]
    quoted = re.findall(r"^\| `([^`]+)` \|", errors, re.MULTILINE)
    assert len(quoted) > 30
    sources = messages()
    for message in quoted:
        parts = [part.strip() for part in message.split("…") if len(part.strip()) > 3]
        pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
        assert parts, message
        assert any(pattern.search(source) for source in sources), f"docs/faq.md: no error says {message!r}"
