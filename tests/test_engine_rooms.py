"""Files of the host engine include only files of their own folder or of lower folders, so there is no cycle."""

from __future__ import annotations

import re
from pathlib import Path

from rec_sdk_torch import _engine

TESTS = Path(__file__).resolve().parent
ENGINE = TESTS.parent / "torch_npu_ext" / "engine"
ROOMS = ["base", "directory", "store", "batch", "policy", "rules", "group", "lifecycle", "plan", "api"]
"""The folders of the engine, from the lowest layer to the highest."""


def included_rooms(text: str) -> set[str]:
    """Lists the folders of the engine from which a file with this text includes."""
    return set(re.findall(r'#include "torch_npu_ext/engine/(\w+)/', text))


def test_every_file_is_in_a_room() -> None:
    assert {path.relative_to(ENGINE).parts[0] for path in ENGINE.rglob("*.*")} == {*ROOMS, "CMakeLists.txt"}


def test_files_include_only_lower_rooms() -> None:
    files = [path for path in ENGINE.rglob("*") if path.suffix in {".h", ".cpp"}]
    up = [
        f"{path.relative_to(ENGINE)} includes from {room}/"
        for path in files
        for room in included_rooms(path.read_text())
        if ROOMS.index(room) > ROOMS.index(path.relative_to(ENGINE).parts[0])
    ]
    assert up == []
    assert sum(bool(included_rooms(path.read_text())) for path in files) > len(files) / 2, "includes are found"


def test_files_of_the_engine_are_included_by_their_whole_path() -> None:
    for path in ENGINE.rglob("*"):
        if path.suffix in {".h", ".cpp"}:
            for name in re.findall(r'#include "([^"]+)"', path.read_text()):
                assert name.startswith(("torch_npu_ext/engine/", "op_kernels/common/")), f"{path}: {name}"


def registered_tests(file: str) -> set[str]:
    """Lists the tests that a C++ file of tests/engine registers."""
    return set(re.findall(r"^TEST\((\w+)\)", (TESTS / "engine" / file).read_text(), re.MULTILINE))


def test_every_rule_is_a_file_and_has_a_test() -> None:
    shared = {"rule", "rules"}
    assert {path.stem for path in (ENGINE / "rules").glob("*.cpp")} == {*_engine.rules(), *shared}
    assert registered_tests("test_rules.cpp") == {f"{name}_rule" for name in _engine.rules()}


def test_every_cache_policy_is_a_file_and_has_a_test() -> None:
    policies = {f"{name}_policy" for name in _engine.cache_policies()}
    assert {path.stem for path in (ENGINE / "policy").glob("*_policy.cpp")} == policies | {"cache_policy"}
    assert policies <= registered_tests("test_policies.cpp")
