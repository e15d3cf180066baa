"""After interrupted saves, failing disks and damaged files, the last complete save loads bit by bit."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import re
import resource
import signal
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import forked_python
import pytest
import torch
from tables import assert_same, contents, delta, loaded, make, refused, save, train, trained

from rec_sdk_torch.checkpoint.__main__ import main
from rec_sdk_torch.saves.format import files, manifest
from rec_sdk_torch.saves.format.errors import CheckpointError
from rec_sdk_torch.saves.format.folders import UNFINISHED, saves_in
from rec_sdk_torch.saves.format.manifest import MANIFEST


@pytest.fixture(params=[manifest.MANY_TABLES, 1], ids=["files", "packs"])
def many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Sets the number of tables at which saves change from a file per table and kind of rows to packs."""
    monkeypatch.setattr(manifest, "MANY_TABLES", request.param)
    return int(request.param)


class FailAt:
    """A hook that fails the n-th call that changes the file system, and unless `only` all later calls, like a
    lost disk.
    """

    def __init__(self, number: int, only: bool) -> None:
        self.left, self.only, self.failed = number, only, 0

    def __call__(self, call: str, path: Path) -> None:
        self.left -= 1
        if self.left == 0 or (self.left < 0 and not self.only):
            self.failed += 1
            raise OSError(errno.EIO, f"planted at {call}", str(path))


def failing_calls(calls: list[tuple[str, str]], full: bool, day: int) -> list[int]:
    """Returns the numbers of the calls to fail, and a number after the last call, with which none fails.

    Without `full`, there is one call of each kind, a different one each day.

    """
    if full:
        return list(range(1, len(calls) + 2))
    kinds: dict[tuple[str, str], list[int]] = {}
    for number, (call, name) in enumerate(calls, start=1):
        kinds.setdefault((call, re.split(r"(?<!^)[^a-z]", name)[0]), []).append(number)
    return [*sorted(numbers[day % len(numbers)] for numbers in kinds.values()), len(calls) + 1]


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("incremental", [False, True])
def test_every_call_fails_once(
    incremental: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Either one call fails, or that call and all later ones. The full suite tries every call both ways; otherwise, one
    call of each kind is tried in one of the two ways.

    """
    source = trained()
    save(source, tmp_path)
    train(source, range(3, 4))
    calls: list[tuple[str, str]] = []
    with monkeypatch.context() as patch:
        patch.setattr(files, "before_change", lambda call, path: calls.append((call, path.name)))
        save(source, tmp_path, incremental)
    before = contents(loaded(tmp_path))
    assert_same(before, source)
    full, day = map(request.config.getoption, ("--full", "--day"))
    numbers = failing_calls(calls, full, day)
    ways = itertools.product(numbers, (True, False)) if full else ((each, (each + day) % 2 > 0) for each in numbers)
    for number, only in ways:
        train(source, range(3 + number, 4 + number))
        fails = number <= len(calls)
        with monkeypatch.context() as patch:
            patch.setattr(files, "before_change", FailAt(number, only))
            with pytest.raises(OSError, match="planted") if fails else contextlib.nullcontext():
                save(source, tmp_path, incremental)
        found, now = contents(loaded(tmp_path)), contents(source)
        # If the folder's sync fails after the rename, the save is complete although `save` has raised.
        assert found == now if not fails else found == before or (number == len(calls) and found == now)
        assert not only or not list(tmp_path.glob(f"{UNFINISHED}*"))
        before = found
    save(source, tmp_path)
    assert_same(loaded(tmp_path), source)
    assert not list(tmp_path.glob(f"{UNFINISHED}*"))


def keep_saving(path: str, incremental: bool, many: int, out: Any) -> None:
    """Trains and saves until the process is killed; reports each step and each save."""
    torch.set_num_threads(1)
    manifest.MANY_TABLES = many
    source = loaded(path)
    while True:
        step = source.optimizers[0].step
        train(source, range(step, step + 1))
        out.send(("trained", step + 1))
        save(source, Path(path), incremental)
        out.send(("saved", step + 1))


@pytest.mark.parametrize("incremental", [False, True])
def test_killed_at_random_points(incremental: bool, many: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """After each kill, the latest reported save or a later one loads bit by bit. There are 25 kills, 5 without --full.

    More than a fifth of the kills must hit a save while it is written; kills are repeated until that is the case.
    """
    enough = 25 if request.config.getoption("--full") else 5
    source = trained(1)
    save(source, tmp_path)
    states, chance = {1: contents(source)}, random.Random(request.config.getoption("--day"))
    points = broken_off = 0
    while points < enough or (points < 25 and broken_off <= enough // 5):
        points += 1
        here, there = forked_python.CONTEXT.Pipe(duplex=False)
        arguments = (str(tmp_path), incremental, many, there)
        child = forked_python.CONTEXT.Process(target=keep_saving, args=arguments, daemon=True)
        child.start()
        there.close()
        reported, saves = 0, chance.randrange(3)
        with contextlib.suppress(EOFError):
            while True:
                what, step = here.recv()
                reported = step if what == "saved" else reported
                saves -= what == "saved"
                if what == "trained" and saves < 0 and child.is_alive():
                    time.sleep(chance.random() * 0.05)
                    child.kill()
                    child.join()
        broken_off += bool(list(tmp_path.glob(f"{UNFINISHED}*")))
        target = loaded(tmp_path)
        step = target.optimizers[0].step
        assert step >= reported
        for at in range(max(states), step):
            train(source, range(at, at + 1))
            states[at + 1] = contents(source)
        assert_same(target, states[step])
    assert broken_off > enough // 5, "too few were killed while they wrote"


DAMAGES: dict[str, Callable[[Path, bytes, int], object]] = {
    "flipped": lambda file, raw, at: file.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << at % 8]) + raw[at + 1 :]),
    "cut": lambda file, raw, at: file.write_bytes(raw[:at]),
    "longer": lambda file, raw, at: file.write_bytes(raw + b"x"),
    "missing": lambda file, raw, at: file.unlink(),
}

MAY_BE = {"longer": ("index", "pack"), "missing": ("index", MANIFEST)}
"""Harmless damages: the end of a file is not read, an index is rebuilt, a folder without manifest is no save."""


def test_damaged_files(
    many: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """Each file of a chain is damaged by a flipped bit and in another way. An error names the file, and the model is
    unchanged.

    The full suite damages each file in every way. Loads do not read indexes, which are derived from other files;
    `verify` does.
    """
    source, target = make(), trained(range(70, 72))
    for step in range(2):
        train(source, range(step, step + 1))
        delta(source, tmp_path)
    before, day = contents(target), request.config.getoption("--day")
    chance, full = random.Random(day), request.config.getoption("--full")
    for number, file in enumerate(sorted(each for each in tmp_path.rglob("*") if each.is_file())):
        raw, (flipped, *others) = file.read_bytes(), DAMAGES
        ways = [*[flipped] * 3, *others] if full else [flipped, others[(number + day) % 3]]
        for way in ways:
            if file.name.startswith(MAY_BE.get(way, ())):
                continue
            DAMAGES[way](file, raw, chance.randrange(len(raw)))
            if file.name.startswith("index"):
                assert main(["verify", str(tmp_path)]) == 1
                assert file.name in capsys.readouterr().err
            else:
                with pytest.raises(CheckpointError, match=file.name):
                    loaded(tmp_path, target)
            file.write_bytes(raw)
    assert main(["verify", str(tmp_path)]) == 0
    assert_same(target, before)
    assert_same(loaded(tmp_path, target), source)


def test_damage_in_a_header_that_can_be_read(tmp_path: Path) -> None:
    """The damaged headers can be parsed, and the bytes of the tensors are unchanged; only the checksum shows
    the damage.
    """
    target = make()
    folder = save(trained(), tmp_path)
    (file,) = folder.glob("a/*/*/rows-*")
    raw = file.read_bytes()
    for old, new in ((b'"table":"a"', b'"table":"b"'), (b'"dtype":"F32"', b'"dtype":"I32"')):
        assert old in raw
        file.write_bytes(raw.replace(old, new, 1))
        refused(target, tmp_path, f"{file.name}: damaged, the checksum of header")
    file.write_bytes(raw)
    loaded(tmp_path, target)


@pytest.mark.usefixtures("many")
def test_everything_is_synced_before_the_save_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contents of a file survive a power failure only if the file was synced, its name only if its folder was
    synced.
    """
    source = trained(2)
    calls: list[tuple[str, Path]] = []
    monkeypatch.setattr(files, "before_change", lambda call, path: calls.append((call, path)))
    target = save(source, tmp_path)
    named = calls.index(("rename", target))
    for place, (call, path) in enumerate(calls[:named]):
        if call in ("create", "write"):
            assert ("sync", path) in calls[place:named], path
        if call in ("create", "mkdir") and path.parent != target.parent:
            assert ("sync", path.parent) in calls[place:named], path
    assert ("sync", target.parent) in calls[named:]


def test_full_disk(tmp_path: Path) -> None:
    """A limit on the size of files emulates a full disk: writing fails half-way through a file."""
    source = trained(6)
    save(source, tmp_path)
    expected = contents(source)
    train(source, range(6, 8))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for size in (0, 100, 1000, 2000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
            with pytest.raises(OSError, match="File too large"):
                save(source, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert_same(loaded(tmp_path), expected)
    assert len(os.listdir(tmp_path)) == 1


def test_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, write = trained(), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, memoryview(data)[:7], at))
    save(source, tmp_path)
    assert_same(loaded(tmp_path), source)


def keep_trying(path: Path, seed: int, saves: int) -> list[str]:
    """Saves its own tables repeatedly; returns the folders and errors of these saves."""
    source, outcomes = trained(seed=seed), []
    for _ in range(saves):
        try:
            outcomes.append(str(save(source, path)))
        except CheckpointError as error:
            outcomes.append(f"refused: {error}")
    return outcomes


POOLS = [ThreadPoolExecutor, partial(ProcessPoolExecutor, mp_context=forked_python.CONTEXT)]


@pytest.mark.parametrize("pool", POOLS, ids=["threads", "processes"])
def test_two_jobs_at_one_path(pool: Callable[[int], Executor], tmp_path: Path) -> None:
    """Two jobs share a folder by mistake: a save is refused while the other job writes, and their saves are not
    mixed.
    """
    with pool(2) as jobs:
        tasks = [jobs.submit(keep_trying, tmp_path, seed, 12) for seed in (1, 2)]
        found = list(itertools.chain(*(task.result(120) for task in tasks)))
    folders, refusals = saves_in(tmp_path), [outcome for outcome in found if outcome.startswith("refused: ")]
    assert all("another save is being written" in outcome for outcome in refusals)
    assert sorted(set(found) - set(refusals)) == sorted(map(str, folders))
    assert len(found) == 24
    expected = [contents(trained(seed=seed)) for seed in (1, 2)]
    assert all(contents(loaded(folder)) in expected for folder in folders)
