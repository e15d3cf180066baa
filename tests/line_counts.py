"""Counts the lines of text in each folder of the repository, and prints them together with the budgets of budget.toml.

A room is a subfolder of one of the folders `SPLIT`, or any other folder or file at the top level. The table marks
rooms over their budget; no check fails because of it.
"""

from __future__ import annotations

import subprocess
import tomllib
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
SPLIT = ("rec_sdk_torch", "torch_npu_ext", "op_kernels", "emulator", "tests")
"""Folders whose subfolders are counted separately."""


def room_of(path: str) -> str:
    """Returns the room of a file: `tests/tbe`, `tests/*` for files beside such folders, `docs`, `Makefile`."""
    top, *rest = path.split("/")
    if top not in SPLIT:
        return top
    return f"{top}/{rest[0]}" if len(rest) > 1 else f"{top}/*"


def count_lines(root: Path) -> Counter[str]:
    """Counts the lines of each room over all text files that git tracks in `root`; returns none if git tracks none."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=False, capture_output=True, text=True).stdout
    lines: Counter[str] = Counter()
    for path in filter(None, listed.split("\0")):
        content = (root / path).read_bytes() if (root / path).is_file() else b""
        lines[room_of(path)] += 0 if b"\0" in content else content.count(b"\n")
    return lines


def main() -> None:
    """Prints the table of lines and budgets."""
    budgets: dict[str, int] = tomllib.loads((HERE / "budget.toml").read_text())["lines"]
    lines = count_lines(HERE.parent)
    print(f"{'lines of text':<28}{'now':>8}{'budget':>8}")
    for room, count in lines.most_common():
        if room in budgets or count >= 300:
            over = "  over" if count > budgets.get(room, count) else ""
            print(f"{room:<28}{count:>8}{budgets.get(room, ''):>8}{over}")
    print(f"{'all':<28}{lines.total():>8}{budgets['all']:>8}{'  over' if lines.total() > budgets['all'] else ''}")


if __name__ == "__main__":
    main()
