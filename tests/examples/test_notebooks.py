"""The notebook runs from first to last cell, and its plots and stored outputs match its text."""

from __future__ import annotations

import ast
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchrec")
matplotlib = pytest.importorskip("matplotlib")
pytestmark = pytest.mark.skipif(find_spec("torch_npu") is not None, reason="the notebook is for the CPU")

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "notebooks" / "from_torchrec.ipynb"
LINK = re.compile(r"\[[^]]+\]\(([^)]+)\)")


def cells(kind: str) -> list[str]:
    """Returns the texts of all cells of a kind."""
    return ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == kind]


@pytest.fixture(scope="module")
def notebook_names() -> dict[str, Any]:
    """Runs the cells; returns the names defined after the last cell. `shown` collects the HTML of the last expression
    of each cell.
    """
    matplotlib.use("Agg")
    names: dict[str, Any] = {"__name__": "__main__", "shown": []}
    for number, source in enumerate(cells("code")):
        body = ast.parse(source).body
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), f"{NOTEBOOK.name}, cell {number}", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"{NOTEBOOK.name}, cell {number}", "eval"), names)
            if value is not None:
                names["shown"].append(value._repr_html_())
    return names


def test_the_cached_model_learns_what_torchrec_learns(notebook_names: dict[str, Any]) -> None:
    plain, cached = (notebook_names["smooth"](notebook_names[name])[-1] for name in ("plain_losses", "cached_losses"))
    assert plain < 0.6
    assert cached == pytest.approx(plain, abs=0.03)


def test_the_pictures_show_rate_and_memory(notebook_names: dict[str, Any]) -> None:
    from matplotlib import pyplot

    figures = [pyplot.figure(number) for number in pyplot.get_fignums()[-3:]]
    assert [len(figure.axes[0].lines) for figure in figures] == [2, 2, 0]
    for rates in notebook_names["hit_rates"].values():
        assert len(rates) == notebook_names["STEPS"] // notebook_names["EVERY"] - 1
        assert rates[0] < rates[-1] < 1
    memory = notebook_names["memory"]
    assert memory["cached"]["device"] == pytest.approx(0.2 * memory["TorchRec"]["device"], rel=0.01)
    assert memory["cached"]["host"] > 0
    pyplot.close("all")


def test_a_collection_has_an_html_view(notebook_names: dict[str, Any]) -> None:
    (shown,) = notebook_names["shown"]
    assert "<th>t_user</th>" in shown


def test_the_notebook_has_outputs_and_its_links_resolve() -> None:
    """The site shows the stored outputs. Warnings are not stored, since they contain local paths."""
    kinds = []
    for number, cell in enumerate(cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if "outputs" in cell):
        assert cell["execution_count"] == number + 1
        kinds += [kind for output in cell["outputs"] for kind in output["data"] if kind != "text/plain"]
    assert kinds == ["text/html", "image/png", "image/png", "image/png"]
    links = [target for text in cells("markdown") for target in LINK.findall(text)]
    assert links
    for target in links:
        assert (NOTEBOOK.parent / target.partition("#")[0]).exists(), target
