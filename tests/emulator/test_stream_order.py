"""With REC_SDK_EMULATED_STREAMS a program that omits an event fails on the EMULATED NPU, and a correct one does not."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

import forked_python
import pytest

from rec_sdk_torch import emulate

SCENARIOS = ("read_too_soon", "staging_used_again", "memory_used_again")


HERE = Path(__file__).parent


def run(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    settings = {name: None for name in os.environ if name.startswith("REC_SDK_EMULATED_")} | variables
    return forked_python.python(*arguments, PYTHONPATH=str(Path(emulate.__file__).parents[1]), **settings)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


@functools.cache
def wrong_rounds(order: str, pause: float, rounds: int) -> dict[tuple[str, bool], int]:
    """Returns the number of wrong rounds by (scenario, whether its event is present)."""
    finished = run(HERE / "stream_mistakes.py", str(pause), str(rounds), REC_SDK_EMULATED_STREAMS=order)
    assert finished.returncode == 0, finished.stderr
    lines = [line.split() for line in finished.stdout.splitlines() if line.startswith(SCENARIOS)]
    return {(name, right == "True"): int(count) for name, right, count in lines}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_late_finds_every_mistake(scenario: str) -> None:
    counts = wrong_rounds("late", 0, 10)
    assert counts[scenario, False] == 10
    assert counts[scenario, True] == 0


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_random_finds_mistakes_in_some_round(scenario: str, seed: int) -> None:
    counts = wrong_rounds(f"random:{seed}", 0, 40)
    assert counts[scenario, False] > 0
    assert counts[scenario, True] == 0


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_eager_misses_mistakes(scenario: str) -> None:
    """The order `late` reveals all mistakes; with `eager`, a slow host, as under a debugger, hides them."""
    counts = wrong_rounds("eager", 0.1, 3)
    assert counts[scenario, False] < 3
    assert counts[scenario, True] == 0
    assert wrong_rounds("late", 0.1, 3)[scenario, False] == 3


PROGRESS = """
import torch
a, b = torch.npu.Stream(), torch.npu.Stream()
staging = torch.zeros(3, 1000).pin_memory()
there = [torch.full((1000,), float(i), device="npu") for i in range(3)]
torch.npu.synchronize()
for stream, i in ((a, 0), (b, 1), (b, 2)):
    with torch.npu.stream(stream):
        staging[i].copy_(there[i] if i else torch.ones_like(there[0]), non_blocking=True)
a_done, b_done = a.record_event(), b.record_event()
assert not a.query() and not b_done.query(), "late: nothing ran"
a.synchronize()
assert a_done.query() and staging[0].eq(1).all()
assert staging[2].eq(0).all(), "late: only what is needed ran"
asked = 0
while not b_done.query():
    asked += 1
assert 0 < asked < 10, asked
assert staging[1:].mean(1).tolist() == [1, 2]
a.wait_event(b.record_event())
torch.npu.synchronize()
assert a.query() and b.query()
print("well")
"""


def test_late_runs_work_that_is_waited_for(script: Path) -> None:
    script.write_text(PROGRESS)
    finished = run(script, REC_SDK_EMULATED_STREAMS="late")
    assert finished.stdout.splitlines()[-1:] == ["well"], finished.stderr


MEMORY = """
import torch
side = torch.npu.Stream()
staging = torch.zeros(1 << 20, dtype=torch.uint8).pin_memory()
for _ in range(500):
    there = torch.full((1 << 20,), 1, dtype=torch.uint8, device="npu")
    with torch.npu.stream(side):
        staging.copy_(there, non_blocking=True)
    there.record_stream(side)
    pinned = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    there.copy_(pinned, non_blocking=True)
print(torch.npu.memory_reserved() >> 20)
"""


@pytest.mark.parametrize("order", ["late", "random:1"])
def test_memory_is_freed_without_synchronization(script: Path, order: str) -> None:
    """500 MiB of tensors pass through 64 MiB of memory; torch's allocator queries the events after which memory
    is free.
    """
    script.write_text(MEMORY)
    finished = run(script, REC_SDK_EMULATED_STREAMS=order, REC_SDK_EMULATED_MEMORY="64M")
    assert finished.returncode == 0, finished.stderr
    assert int(finished.stdout.splitlines()[-1]) <= 64


RESULTS = """
import torch
from rec_sdk_torch.operators.devices.backends import backend_for
from rec_sdk_torch.operators.calls import ops
backend_for(torch.device("npu"))
SHAPE = 64, 32
rows, slots = torch.full(SHAPE, 2, dtype=torch.uint8).npu(), torch.arange(64, dtype=torch.int32).npu()
places = []

def sevens(like: torch.Tensor) -> torch.Tensor:
    freed = torch.empty(SHAPE, dtype=torch.uint8, device="npu")  # as another thread may do meanwhile
    ops.scatter_rows(freed, slots, rows)
    places.append(freed.data_ptr())
    return torch.full_like(like, 7)

library = torch.library.Library("aten", "IMPL")
library.impl("erfinv", sevens, "CPU")
result = torch.erfinv(rows)
assert places == [result.data_ptr()], "the allocator reuses it"
print(result.cpu().unique().tolist())
"""


def test_a_late_kernel_does_not_overwrite_a_host_result(script: Path) -> None:
    script.write_text(RESULTS)
    finished = run(script, REC_SDK_EMULATED_STREAMS="late")
    assert finished.stdout.splitlines()[-1:] == ["[7]"], finished.stdout + finished.stderr


def test_an_unknown_order_is_refused(script: Path) -> None:
    script.write_text("import torch; torch.ones(2).npu()")
    finished = run(script, REC_SDK_EMULATED_STREAMS="lately")
    assert finished.returncode < 0
    message = 'REC_SDK_EMULATED_STREAMS is "lately"; it must be eager, late, or random:SEED with a whole number below'
    assert message in finished.stderr
