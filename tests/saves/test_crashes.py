"""Saves that break off, disks that fail and files that are damaged: the last complete save loads bit by bit."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from tables import contents, make, train
from test_deltas import loaded, save
from test_saver import same

import rec_sdk_torch as rst
from rec_sdk_torch.checkpoint.__main__ import main
from rec_sdk_torch.saves.format import files
from rec_sdk_torch.saves.format.errors import CheckpointError
from rec_sdk_torch.saves.format.folders import UNFINISHED, saves_in


class FailAt:
    """Fails the n-th call that changes the file system, and all after it, as a disk that goes away does."""

    def __init__(self, number: int, only: bool) -> None:
        self.left, self.only, self.failed = number, only, 0

    def __call__(self, call: str, path: Path) -> None:
        self.left -= 1
        if self.left == 0 or (self.left < 0 and not self.only):
            self.failed += 1
            raise OSError(errno.EIO, f"planted at {call}", str(path))


def numbers_of(calls: list[tuple[str, str]], full: bool, day: int) -> list[int]:
    """The calls that are to fail, and one more: all of them, or one of each kind, every day another."""
    if full:
        return list(range(1, len(calls) + 2))
    kinds: dict[tuple[str, str], list[int]] = {}
    for number, (call, name) in enumerate(calls, start=1):
        kinds.setdefault((call, re.split(r"(?<!^)[^a-z]", name)[0]), []).append(number)
    return [*sorted(numbers[day % len(numbers)] for numbers in kinds.values()), len(calls) + 1]


@pytest.mark.parametrize("only", [True, False], ids=["one call", "all after"])
@pytest.mark.parametrize("incremental", [False, True])
def test_every_call_fails_once(
    incremental: bool, only: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Beyond the full suite: one call of every kind."""
    source = make()
    train(source, range(3))
    save(source, tmp_path)
    train(source, range(3, 4))
    calls: list[tuple[str, str]] = []
    with monkeypatch.context() as patch:
        patch.setattr(files, "before", lambda call, path: calls.append((call, path.name)))
        rst.Saver().save(source, tmp_path, incremental=incremental)
    assert len(calls) > 20
    before = contents(loaded(tmp_path))
    assert before == contents(source)
    failures = []
    for number in numbers_of(calls, *map(request.config.getoption, ("--full", "--day"))):
        train(source, range(3 + number, 4 + number))
        plan = FailAt(number, only)
        with monkeypatch.context() as patch:
            patch.setattr(files, "before", plan)
            failed = False
            try:
                rst.Saver().save(source, tmp_path, incremental=incremental)
            except OSError as error:
                failed = error.errno == errno.EIO
        assert failed == bool(plan.failed)
        failures.append(failed)
        # a sync of the folder that fails after the rename leaves a complete save that was not promised
        found = contents(loaded(tmp_path))
        now = contents(source)
        assert found == now if not failed else found in (before, now)
        before = found
    assert failures == [True] * (len(failures) - 1) + [False]
    save(source, tmp_path)
    same(contents(loaded(tmp_path)), contents(source))
    assert not list(tmp_path.glob(f"{UNFINISHED}*"))


def keep_saving(path: str, incremental: bool, out: Any) -> None:
    """Trains and saves for ever, and says so."""
    torch.set_num_threads(1)
    source = make()
    rst.Saver().load(source, path)
    while True:
        step = source.optimizers[0].step
        train(source, range(step, step + 1))
        out.send(("trained", step + 1))
        rst.Saver().save(source, path, incremental=incremental)
        out.send(("saved", step + 1))


@pytest.mark.parametrize("incremental", [False, True])
def test_killed_at_random_points(incremental: bool, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Every save that was reported is there, or a later one, bit by bit; at 25 points, in the fast suite at 5.

    More than a fifth of them have to be while it writes. Five may be too few for that, so there are more until it is.
    """
    enough = 25 if request.config.getoption("--full") else 5
    source = make()
    train(source, range(1))
    save(source, tmp_path)
    states, chance = {1: contents(source)}, random.Random(request.config.getoption("--day"))
    points = broken_off = 0
    while points < enough or (points < 25 and broken_off <= enough // 5):
        points += 1
        here, there = warm.CONTEXT.Pipe(duplex=False)
        child = warm.CONTEXT.Process(target=keep_saving, args=(str(tmp_path), incremental, there), daemon=True)
        child.start()
        there.close()
        reported, saves = 0, chance.randrange(3)
        while True:
            what, step = here.recv()
            reported = step if what == "saved" else reported
            saves -= what == "saved"
            if what == "trained" and saves < 0:
                break
        time.sleep(chance.random() * 0.05)
        child.kill()
        child.join()
        with contextlib.suppress(EOFError):
            while True:
                what, step = here.recv()
                reported = step if what == "saved" else reported
        broken_off += bool(list(tmp_path.glob(f"{UNFINISHED}*")))
        target = loaded(tmp_path)
        step = target.optimizers[0].step
        assert step >= reported
        while max(states) < step:
            at = max(states)
            train(source, range(at, at + 1))
            states[at + 1] = contents(source)
        same(contents(target), states[step])
    assert broken_off > enough // 5, "too few were killed while they wrote"


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_damaged_files(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """A bit of each file of a chain flipped, or each file cut: an error that names the file; the model stays.

    In the full suite, 200 flips.

    Loads do not read indexes, which are derived from the others; `verify` does.
    """
    source = make()
    for step in range(3):
        train(source, range(step, step + 1))
        save(source, tmp_path)
    target = make()
    train(target, range(70, 72))
    before = contents(target)
    found = sorted(each for each in tmp_path.rglob("*") if each.is_file())
    chance = random.Random(request.config.getoption("--day"))
    damaged = list(found)
    if damage == "flip" and request.config.getoption("--full"):
        damaged += chance.choices(found, k=200 - len(found))
    cases = [(file, chance.randrange(1 << 30)) for file in damaged]
    for file, place in cases:
        raw = file.read_bytes()
        at = place % len(raw)
        flipped = raw[:at] + bytes([raw[at] ^ 1 << place % 8]) + raw[at + 1 :]
        file.write_bytes(flipped if damage == "flip" else raw[:at])
        if file.name.startswith("index"):
            assert main(["verify", str(tmp_path)]) == 1
            assert file.name in capsys.readouterr().err
        else:
            with pytest.raises(CheckpointError) as raised:
                rst.Saver().load(target, tmp_path)
            assert file.name in str(raised.value)
        file.write_bytes(raw)
    assert main(["verify", str(tmp_path)]) == 0
    same(contents(target), before)
    rst.Saver().load(target, tmp_path)
    same(contents(target), contents(source))


def test_damage_in_a_header_that_can_be_read(tmp_path: Path) -> None:
    """Each is valid, and the bytes of the tensors are as they were."""
    source, target = make(), make()
    train(source, range(3))
    folder = save(source, tmp_path)
    before = contents(target)
    (file,) = folder.glob("a/*/*/rows-*")
    raw = file.read_bytes()
    for old, new in ((b'"table":"a"', b'"table":"b"'), (b'"dtype":"F32"', b'"dtype":"I32"')):
        assert old in raw
        file.write_bytes(raw.replace(old, new, 1))
        with pytest.raises(CheckpointError, match=f"{file.name}: damaged, the checksum of header"):
            rst.Saver().load(target, tmp_path)
        same(contents(target), before)
    file.write_bytes(raw)
    rst.Saver().load(target, tmp_path)


def test_all_is_on_the_disk_before_a_save_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the power fails, what a file has is there if the file was synced since, and its name if its folder was."""
    source = make()
    train(source, range(2))
    calls: list[tuple[str, Path]] = []
    monkeypatch.setattr(files, "before", lambda call, path: calls.append((call, path)))
    target = save(source, tmp_path)
    named = calls.index(("rename", target))
    for place, (call, path) in enumerate(calls[:named]):
        if call in ("create", "write"):
            assert ("sync", path) in calls[place:named], path
        if call in ("create", "mkdir") and path.parent != target.parent:
            assert ("sync", path.parent) in calls[place:named], path
    assert ("sync", target.parent) in calls[named:]


def test_full_disk(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: writing fails half-way through a file."""
    source = make()
    train(source, range(6))
    save(source, tmp_path)
    expected = contents(source)
    train(source, range(6, 8))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for size in (0, 100, 1000, 2000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
            with pytest.raises(OSError, match="File too large"):
                rst.Saver().save(source, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    same(contents(loaded(tmp_path)), expected)
    assert len(os.listdir(tmp_path)) == 1


def test_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make()
    train(source, range(3))
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, memoryview(data)[:7], at))
    save(source, tmp_path)
    same(contents(loaded(tmp_path)), contents(source))


def test_two_jobs_at_one_path(tmp_path: Path) -> None:
    """One is refused while another writes, and nothing is mixed."""
    sources = [make(seed=seed) for seed in (1, 2)]
    for source in sources:
        train(source, range(3))
    expected = [contents(source) for source in sources]
    outcomes: list[Any] = []

    def job(source: Any) -> None:
        for _ in range(10):
            try:
                outcomes.append(rst.Saver().save(source, tmp_path))
            except CheckpointError as error:
                outcomes.append(str(error))

    threads = [threading.Thread(target=job, args=(source,)) for source in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refusals = [outcome for outcome in outcomes if "another save is being written" in outcome]
    folders = saves_in(tmp_path)
    assert len(refusals) + len(folders) == 20
    for folder in folders:
        assert contents(loaded(folder)) in expected


def _job(path: Path, seed: int, saves: int, outcomes: Any) -> None:
    """A process that trains tables of its own and saves them."""
    source = make(seed=seed)
    train(source, range(3))
    for _ in range(saves):
        try:
            outcomes.put(str(rst.Saver().save(source, path)))
        except CheckpointError as error:
            outcomes.put(f"refused: {error}")


def test_two_processes_at_one_path(tmp_path: Path) -> None:
    """As two jobs that were given one folder by mistake."""
    outcomes = warm.CONTEXT.Queue()
    jobs = [warm.CONTEXT.Process(target=_job, args=(tmp_path, seed, 12, outcomes)) for seed in (1, 2)]
    for job in jobs:
        job.start()
    found = [outcomes.get(timeout=120) for _ in range(24)]
    for job in jobs:
        job.join()
        assert job.exitcode == 0
    folders = saves_in(tmp_path)
    refused = [outcome for outcome in found if outcome.startswith("refused: ")]
    assert all("another save is being written" in outcome for outcome in refused)
    assert sorted(set(found) - set(refused)) == sorted(map(str, folders))
    expected = []
    for seed in (1, 2):
        source = make(seed=seed)
        train(source, range(3))
        expected.append(contents(source))
    assert all(contents(loaded(folder)) in expected for folder in folders)
