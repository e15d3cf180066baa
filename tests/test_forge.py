"""The workflow, templates and project files name only commands, versions and files that exist."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import commit_message
import line_counts
import pytest

import rec_sdk_torch

ROOT = Path(__file__).resolve().parent.parent
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def loaded(path: Path) -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(path.read_text())


def targets(text: str) -> set[str]:
    """Lists the targets of the make commands in a file, except names beginning with a dot, which are files."""
    return set(re.findall(r"\bmake ([a-z][a-z-]*)", text))


def test_jobs_of_the_workflow() -> None:
    jobs = loaded(WORKFLOW)["jobs"]
    assert set(jobs) == {"lint", "cpu", "npu", "docs", "wheels"}
    for job in jobs.values():
        assert job["steps"][0]["uses"].startswith("actions/checkout@")
        assert job["timeout-minutes"] <= 90
    found = {f"Programming Language :: Python :: {each}" for each in jobs["wheels"]["strategy"]["matrix"]["python"]}
    assert found == {each for each in PROJECT["classifiers"] if re.search(r":: 3\.\d", each)}


@pytest.mark.parametrize("path", [WORKFLOW, ROOT / "Dockerfile"], ids=lambda path: path.name)
def test_make_commands_exist(path: Path) -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = targets(path.read_text())
    assert named
    assert named <= known


def test_templates_ask_for_the_doctor() -> None:
    problem = loaded(ROOT / ".github" / "ISSUE_TEMPLATE" / "problem.yml")
    (doctor,) = [each for each in problem["body"] if each.get("id") == "doctor"]
    assert doctor["validations"]["required"]
    assert "python -m rec_sdk_torch.doctor" in doctor["attributes"]["description"]
    for path in TEMPLATES:
        body = loaded(path).get("body", [])
        ids = [each["id"] for each in body if "id" in each]
        assert len(ids) == len(set(ids))
        assert {each["type"] for each in body} <= {"markdown", "textarea", "input", "dropdown", "checkboxes"}


def test_every_file_says_this_version() -> None:
    version = PROJECT["version"]
    assert rec_sdk_torch.__version__ == version
    for file, line in {
        "README.md": rf"^This is version {re.escape(version)} \(",
        "README.zh-CN.md": rf"^当前版本为 {re.escape(version)}[^\w.]",
        "CHANGELOG.md": rf"^## \[{re.escape(version)}\] - ",
        "torch_npu_ext/serving/CMakeLists.txt": rf"^project\(rec_sdk_serving VERSION {re.escape(version)} ",
    }.items():
        assert re.search(line, (ROOT / file).read_text(), re.MULTILINE), file


def test_the_citation_is_of_this_version() -> None:
    citation = loaded(ROOT / "CITATION.cff")
    assert citation["version"] == PROJECT["version"]
    assert f"## [{citation['version']}] - {citation['date-released']}\n" in (ROOT / "CHANGELOG.md").read_text()
    assert citation["license"] == PROJECT["license"]
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in PROJECT["authors"]]


def test_nothing_is_unpickled() -> None:
    """The package unpickles nothing, as SECURITY.md states; ranks of one job send each other errors."""
    calls = {"pickle", "eval", "exec", "marshal", "shelve"}
    found = []
    for path in (ROOT / "rec_sdk_torch").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                package, _, function = name.partition(".")
                if package in calls or name == "torch.load":
                    found.append((path.name, function))
                if name.endswith((".load", ".save")) and name.startswith("np."):
                    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                    assert keywords.get("allow_pickle", "False") == "False", f"{path.name}:{node.lineno}"
    assert set(found) == {("collectives.py", "dumps"), ("collectives.py", "loads")}


@pytest.mark.parametrize("page", ["SECURITY.md", "SUPPORT.md"])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("https://")]
    named = [name for name in re.findall(r"`((?:tests|docs)/[^`]+)`", text) if "*" not in name]
    assert [link for link in [*links, *named] if not (ROOT / link.partition("#")[0]).exists()] == []
    for path, heading in (link.split("#") for link in links if "#" in link):
        lines = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.MULTILINE)
        assert heading in {re.sub(r"[^\w -]", "", line).lower().replace(" ", "-") for line in lines}, (
            f"{path}#{heading}"
        )


def test_the_image_copies_what_its_builds_need() -> None:
    """`.dockerignore` excludes no tracked file."""
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout")
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line]
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in tracked if any(Path(name).match(each) for each in ignored if "*" not in each)] == []


def test_budgets_are_of_rooms_that_exist() -> None:
    budgets = tomllib.loads((ROOT / "tests" / "budget.toml").read_text())["lines"]
    counted = line_counts.count_lines(ROOT)
    if not counted:
        pytest.skip("no git checkout")
    assert budgets.keys() - {"all"} <= counted.keys()
    assert counted["tests/tbe"] > counted["tests/*"] / 10 > 100
    assert counted["tests/data"] < 300, "saves are archives, which have no lines"


@pytest.mark.parametrize(
    ("summary", "words"),
    [
        ("Cache: write small tables in one pack file", ""),
        ("rec_sdk_torch/saves: bring back rows", ""),
        ("Merge branch 'main'", ""),
        ("Candidates say how many places they have", "an area and an imperative"),
        ("Cache: writes small tables in one file", "'writes' is no imperative"),
        ("Cache: fixed a wait", "'fixed' is no imperative"),
        ("Cache: write " + 60 * "x", "73 characters"),
        ("Cache: write files\nat once", "second line"),
        ("", "an area and an imperative"),
    ],
)
def test_messages_of_commits(summary: str, words: str) -> None:
    assert words in (commit_message.problem(f"{summary}\n# a comment of git\n") or "")
    assert (commit_message.problem(summary) is None) == (words == "")


def test_the_hook_refuses_a_message(tmp_path: Path) -> None:
    message = tmp_path / "message"
    for text, status in (("Docs: add a page\n\nIt was not there.\n", 0), ("A page\n", 1)):
        message.write_text(text)
        done = subprocess.run([".githooks/commit-msg", message], cwd=ROOT, check=False, capture_output=True, text=True)
        assert done.returncode == status, done.stderr
    assert "CONTRIBUTING.md" in done.stderr
