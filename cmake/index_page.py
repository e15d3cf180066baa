"""The README for a package index. Links to files of the repository would be dead there, so they become text."""

from __future__ import annotations

import re

_LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)#\s]+)(?:#[^)\s]*)?\)")


def description(readme: str) -> str:
    """Replaces links to files, `[Saves](docs/checkpoint.md#files)`, by text and path: `Saves (docs/checkpoint.md)`."""
    return _LINK.sub(lambda link: link[1] if link[1] in (link[2], f"`{link[2]}`") else f"{link[1]} ({link[2]})", readme)
