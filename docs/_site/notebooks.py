"""A parser of notebooks for the site: cells and their stored outputs, which are not run again."""

from __future__ import annotations

import json
from typing import Any

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser

_HTML = "```{{raw}} html\n{}\n```"
_PNG = '<img alt="the plot" src="data:image/png;base64,{}">'


def _output(output: dict[str, Any]) -> str:
    """Returns an output as MyST Markdown."""
    data = output.get("data", {})
    if "image/png" in data:
        return _HTML.format(_PNG.format("".join(data["image/png"]).replace("\n", "")))
    if "text/html" in data:
        return _HTML.format("".join(data["text/html"]))
    return "```text\n" + "".join(data.get("text/plain") or output["text"]).rstrip() + "\n```"


def as_markdown(notebook: str) -> str:
    """Returns the text of a page: Markdown cells, code cells, and behind each code cell its outputs."""
    parts = []
    for cell in json.loads(notebook)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts += [f"```python\n{source}\n```", *map(_output, cell["outputs"])]
    return "\n\n".join(parts) + "\n"


class NotebookParser(MystParser):
    """The parser of `.ipynb` files."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Parses the notebook's JSON into `document`."""
        super().parse(as_markdown(inputstring), document)
