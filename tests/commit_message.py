"""Checks the message of a commit: `python tests/commit_message.py FILE`, which the commit-msg hook runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

LONGEST = 72
SUMMARY = re.compile(r"(?P<area>\w[\w.,/ -]*): (?P<verb>[a-z]+)\b")
GIT = ("Merge ", "Revert ", "fixup! ", "squash! ")
"""Beginnings of summaries that git generates."""
IMPERATIVES = {"bring", "embed", "feed", "need", "speed"}
"""Imperatives that end like a past tense or a participle."""


def third_person() -> set[str]:
    """Returns the verbs of tests/verbs.txt, such as "adds"."""
    words = (Path(__file__).resolve().parent / "verbs.txt").read_text().lower().split()
    return {word.rstrip("*") for word in words}


def problem(message: str) -> str | None:
    """Returns what is wrong with a commit message; None if nothing is."""
    summary, *body = [line.rstrip() for line in message.splitlines() if not line.startswith("#")] or [""]
    if summary.startswith(GIT):
        return None
    if len(summary) > LONGEST:
        return f"the summary has {len(summary)} characters, at most {LONGEST} are shown in lists of commits"
    match = SUMMARY.match(summary)
    if match is None:
        return 'the summary must have an area and an imperative, such as "Cache: write small tables in one pack file"'
    verb = match["verb"]
    if verb in third_person() or (verb.endswith(("ed", "ing")) and verb not in IMPERATIVES):
        return f"{verb!r} is no imperative, such as 'add'"
    if body and body[0]:
        return "the second line must be empty"
    return None


def main() -> int:
    """Prints what is wrong with the message in the file; returns 1 if anything is wrong, else 0."""
    found = problem(Path(sys.argv[1]).read_text())
    if found is not None:
        print(f"commit message: {found}; see CONTRIBUTING.md", file=sys.stderr)
    return int(found is not None)


if __name__ == "__main__":
    sys.exit(main())
