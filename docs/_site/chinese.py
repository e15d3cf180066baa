"""Chinese on the documentation site: search terms, and the words and side bar of Chinese pages."""

from __future__ import annotations

import re
from collections.abc import Callable

HANZI = r"\u3400-\u9fff"
RUN = re.compile(rf"[{HANZI}]+|[^\W{HANZI}]+")
"""A run of Chinese characters, or a word of another script."""

SPLIT_QUERY = r"""
var splitQuery = (query) =>
  (query.match(/[\u3400-\u9fff]+|(?:(?![\u3400-\u9fff])[\p{Letter}\p{Number}_])+/gu) || [])
    .flatMap((run) => {
      if (!/^[\u3400-\u9fff]{3,}$/.test(run)) return [run];
      return [...run].slice(1).map((_, at) => run.slice(at, at + 2));
    });
"""
"""JavaScript for the search page: splits a query into words and, in Chinese, pairs of neighbouring characters."""

WORDS = {
    "Back to top": "回到顶部",
    "Next": "下一页",
    "On this page": "本页内容",
    "Previous": "上一页",
    "Search": "搜索",
    "Skip to content": "跳到正文",
}
"""Words of the theme on Chinese pages."""


def is_chinese(page: str) -> bool:
    """Returns whether a page, named relative to the repository without suffix, is in Chinese."""
    return page.startswith("docs/zh/") or page == "README.zh-CN"


def split(text: str) -> list[str]:
    """Returns the terms of a text for the search index.

    Terms are words and, in Chinese, each character and each pair of neighbours: Chinese has no spaces between words,
    and most words have two characters. "设备内存" is found by "设备" and by "内存".
    """
    terms = []
    for run in RUN.findall(text):
        if re.match(f"[{HANZI}]", run):
            terms += [*run, *(run[at : at + 2] for at in range(len(run) - 1))]
        else:
            terms.append(run)
    return terms


def translate(fallback: Callable[[str], str]) -> Callable[[str], str]:
    """Returns a translation function for the theme's templates; `fallback` translates what `WORDS` lacks."""
    return lambda text: WORDS.get(text) or fallback(text)


def side_bar(tree: str, chinese: bool, link: str) -> str:
    """Returns the navigation tree of a page without the groups of the other language.

    Args:
        tree: All groups in HTML; a group begins with its caption.
        chinese: Whether the page is in Chinese.
        link: Address of the start page in the other language, which the tree ends with.
    """
    groups = re.split(r'(?=<p class="caption")', tree)
    captions = [re.sub(r"<ul.*", "", group, flags=re.DOTALL) for group in groups]
    kept = [
        group
        for group, caption in zip(groups, captions, strict=True)
        if bool(re.search(f"[{HANZI}]", caption)) == chinese
    ]
    name = "English" if chinese else "中文文档"
    return f'{"".join(kept)}<ul><li class="toctree-l1"><a class="reference internal" href="{link}">{name}</a></li></ul>'
