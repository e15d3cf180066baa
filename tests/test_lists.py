"""Lists in pages and modules match the tables that they repeat; tests use `no_such` as an unknown name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from rec_sdk_torch._engine import cache_policies
from rec_sdk_torch.fbgemm.optimizers import _OPTIMIZERS
from rec_sdk_torch.formulas import SPECS
from rec_sdk_torch.operators.devices.backends import _BACKENDS
from rec_sdk_torch.tbe import BoundsCheckMode, Home
from rec_sdk_torch.tools.doctor.command import KINDS

ROOT = Path(__file__).resolve().parent.parent
LISTS: dict[str, tuple[str, str, str, Callable[[], Iterable[str]]]] = {
    "cache policies": ("docs/cache.md", r"^\| policy \|.*?\n\n", r"^\| `(\w+)`", cache_policies),
    "optimizers of FBGEMM": (
        "docs/fbgemm.md",
        r"^\| `optimizer` \| .*? \(",
        r"`([A-Z_]+)`",
        lambda: [each.name for each in _OPTIMIZERS],
    ),
    "homes": ("docs/faq.md", r"`home` that is none of .*?;", r'"(\w+)"', lambda: [each.value for each in Home]),
    "modes of the check of ids": (
        "rec_sdk_torch/modules/embedding_collections.py",
        r"bounds_check_mode: handling of .*?check_finite",
        r'`"(\w+)"`',
        lambda: [each.value for each in BoundsCheckMode],
    ),
}
"""For each list: its file, a pattern of its text, a pattern of a name in it, and the names that it must contain."""


@pytest.mark.parametrize("what", LISTS)
def test_a_list_matches_its_table(what: str) -> None:
    file, text, name, table = LISTS[what]
    found = re.search(text, (ROOT / file).read_text(), re.MULTILINE | re.DOTALL)
    assert found, f"{file} lists no {what}"
    assert sorted(re.findall(name, found[0], re.MULTILINE)) == sorted(table()), f"{file}: {what}"


def test_the_doctor_checks_every_backend() -> None:
    assert list(KINDS) == list(_BACKENDS)


KNOWN: dict[str, Callable[[], set[str]]] = {
    r"torch\.optim\.([A-Z]\w+)": lambda: {
        "Optimizer",
        "LBFGS",  # needs the loss several times, so no table spec has it
        *(name.rpartition(".")[2] for spec in SPECS for name in spec.classes),
    },
    r"policy(?:=\"| is ')(\w+)": lambda: {"no_such", *cache_policies()},
}
"""Patterns of names in tests, and the names that may occur."""


@pytest.mark.parametrize("written", KNOWN)
def test_unknown_names_in_tests_are_no_such(written: str) -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        unknown = set(re.findall(written, path.read_text())) - KNOWN[written]()
        assert not unknown, f"{path}: {sorted(unknown)}"
