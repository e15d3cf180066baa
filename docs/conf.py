"""Sphinx configuration of the documentation site, which is built from the repository's pages by `make docs`.

The source folder of Sphinx is the root of the repository, so that a link between two pages is the same on the site and
in a viewer of the repository.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.search.en import SearchEnglish

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT / "docs/_site"))
import chinese  # noqa: E402
from notebooks import NotebookParser  # noqa: E402

_INIT = (_ROOT / "rec_sdk_torch" / "__init__.py").read_text()

project = "rec_sdk_torch"
author = "the authors of rec_sdk_torch"
copyright = author
release = re.findall(r'^__version__ = "(.*)"$', _INIT, re.MULTILINE)[0]
version = release

root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "README.zh-CN.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    "emulator/**README.md",
    "examples/README.md",
    "examples/notebooks/*.ipynb",
    "op_kernels/*/README.md",
    "tests/README.md",
    "tests/plants/*.md",
]
exclude_patterns = [".*", "build", "**/__pycache__", "**/*.egg-info", "tests/data"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_reredirects",
]

redirects = {
    "docs/levels": "layers.html",
    "docs/life": "admission_eviction.html",
    "docs/zh/life": "admission_eviction.html",
}
"""Former addresses of pages, and where they are now."""

myst_enable_extensions = ["colon_fence"]
myst_disable_syntax = ["footnote_ref", "footnote_block"]  # names of tests contain [^...]
myst_heading_anchors = 4  # the same heading anchors as in repository viewers

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autoclass_content = "both"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Example", "example_section")]
default_role = "py:obj"  # single backticks of docstrings: a link where it is a name of the reference, else code
python_maximum_signature_line_length = 90
add_module_names = False
toc_object_entries_show_parents = "hide"

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = "rec_sdk_torch"
html_additional_pages = {"index": "to_start.html"}
templates_path = ["_site"]
html_static_path = ["_site/static"]
html_css_files = ["site.css"]
html_search_language = "en+zh"
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
pygments_style = "friendly"
pygments_dark_style = "monokai"


def _add_readme(app: Sphinx, page: str, source: list[str]) -> None:
    """Puts the README in front of the table of contents as the start page, with links made relative to docs/.

    A link to the README leads to this page.
    """
    if page == "README.zh-CN":
        source[0] = source[0].replace("](README.md)", f"]({root_doc}.md)")
    if page == root_doc:
        readme = re.sub(r"\]\((?!https://|#)", "](../", (_ROOT / "README.md").read_text())
        source[0] = readme + "\n" + source[0]
        app.env.note_dependency(str(_ROOT / "README.md"))


def _name_files_from_the_root(app: Sphinx, page: nodes.document) -> None:
    """Replaces the absolute paths in a shown difference of two files by paths of the repository."""
    for block in page.findall(nodes.literal_block):
        if block.astext().startswith("--- "):
            block[:] = [nodes.Text(block.astext().replace(f"{_ROOT}/", ""))]
            block.rawsource = block.astext()


def _show_defaults(
    app: Sphinx, what: str, name: str, thing: object, options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Shows the `<factory>` default of a dataclass field as `...`, which Sphinx can parse."""
    return signature and signature.replace("<factory>", "..."), returns


class _EnglishAndChinese(SearchEnglish):
    """Search of a site with pages in both languages."""

    lang = "en+zh"
    js_splitter_code = chinese.SPLIT_QUERY

    def split(self, input: str) -> list[str]:
        return chinese.split(input)


def _set_language(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document) -> None:
    """Sets the `lang` attribute, the theme's words and the side bar of a page by the language of its text."""
    in_chinese = chinese.is_chinese(page)
    if in_chinese:
        context["language"] = "zh-CN"
        context["_"] = context["gettext"] = chinese.translate(app.translator.gettext)
    other_start = context["pathto"](root_doc if in_chinese else "docs/zh/index")
    context["furo_navigation_tree"] = chinese.side_bar(context["furo_navigation_tree"], in_chinese, other_start)


def setup(app: Sphinx) -> None:
    """Connects the functions above to Sphinx's events, and registers the parser of notebooks."""
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(NotebookParser)
    app.add_search_language(_EnglishAndChinese)
    app.connect("html-page-context", _set_language, priority=900)  # the theme builds the tree first
    app.connect("source-read", _add_readme)
    app.connect("doctree-read", _name_files_from_the_root)
    app.connect("autodoc-process-signature", _show_defaults)
