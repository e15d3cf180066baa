"""`python -m rec_sdk_torch.cache_advice`: its counts match a training run, and its advice follows from the counts."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from embeddings import embedding_of, train

from rec_sdk_torch import _engine
from rec_sdk_torch.tbe import TableBatchedEmbedding, TableConfig
from rec_sdk_torch.tools.cache_advice.advice import Table, cache_sizes, choose_cache, simulate_table
from rec_sdk_torch.tools.cache_advice.command import _progress_bar, main
from rec_sdk_torch.tools.cache_advice.costs import Bandwidth, measure_bandwidth
from rec_sdk_torch.tools.cache_advice.simulation import MAX_AHEAD, Counts, Simulation
from rec_sdk_torch.tools.cache_advice.traces import TableTrace, TraceError, read_traces

Ids = npt.NDArray[np.int64]
SPEED = Bandwidth(1e9, 1e9, "a test's")
FEATURE = np.zeros(1, np.int64)
COUNTS = ("unique_rows", "new_rows", "unique_misses", "rows_in", "rows_out", "lookups")


def _engine_of(slots: int, policy: str) -> Any:
    initializer = _engine.Initializer("uniform", 0.0, 1.0, 0.0, 1.0)
    sizes = {"num_embeddings": 1000, "slots": slots, "capacity": 0, "seed": 0, "state_init": []}
    table = _engine.TableSpec(name="t", hashed=True, initializer=initializer, bounds_check="fatal", **sizes)
    return _engine.Engine([table], 1, 0, [], [0], [], [], policy)


def planned(batches: Sequence[Ids], slots: int, policy: str, ahead: int, warm: int) -> list[int]:
    """Returns `COUNTS` over all batches after the first `warm`; each batch is trained before the next."""
    engine, looks = _engine_of(slots, policy), _engine.policy_looks_ahead(policy)
    announced: deque[Any] = deque()
    offsets = [np.array([0, len(ids)], np.int64) for ids in batches]
    for place, ids in enumerate(batches):
        if place == warm:
            engine.tables.reset_stats()
        while looks and len(announced) <= ahead and place + len(announced) < len(batches):
            at = place + len(announced)
            announced.append(engine.announce(batches[at], offsets[at], FEATURE, 1))
        plan = engine.plan(ids, offsets[place], FEATURE, 1, announced=announced.popleft() if announced else None)
        records = np.zeros((max(plan.rows_in, plan.rows_out), engine.record_bytes), np.uint8)
        if plan.rows_in:
            engine.read_in(plan, records[: plan.rows_in])
        _engine.start_plans([plan])
        engine.applied(plan)
        if plan.rows_out:
            engine.complete_write_back(plan, records[: plan.rows_out])
        plan.release()
    stats = engine.tables.stats()
    return [stats[name] for name in COUNTS]


def batches_of(seed: int, count: int = 40, ids: int = 30, rows: int = 200) -> list[Ids]:
    draws = np.random.default_rng(seed)
    return [(rows * draws.random(ids) ** 3).astype(np.int64) - 7 for _ in range(count)]


def distinct(batches: Sequence[Ids]) -> int:
    return len(np.unique(np.concatenate(batches)))


@pytest.mark.parametrize("policy", ["lru", "lfu", "lrfu"])
@pytest.mark.parametrize("slots", [35, 80, 300])
def test_counts_match_a_training_run(policy: str, slots: int, device: torch.device) -> None:
    batches = batches_of(slots)
    table = embedding_of(TableConfig("t", 100, 4), cache=slots, cache_policy=policy, device=device)
    train(table, *map(torch.from_numpy, batches))
    stats = table.cache_stats()
    found = Simulation.from_batches(batches).run(slots, policy, ahead=0)
    names = ("unique_rows", "new_rows", "unique_misses", "rows_in", "rows_out")
    assert [found.rows, found.new, found.misses, found.rows_in, found.rows_out] == [stats[name] for name in names]
    assert found.batches == stats["batches"] == len(batches)


@pytest.mark.parametrize("policy", _engine.cache_policies())
@pytest.mark.parametrize(("slots", "ahead", "warm"), [(60, 0, 0), (61, 2, 0), (90, 3, 7), (300, MAX_AHEAD, 1)])
def test_counts_match_the_planner(policy: str, slots: int, ahead: int, warm: int) -> None:
    batches = [*batches_of(slots, count=150, ids=60, rows=900), *batches_of(1, count=150, ids=5, rows=40)]
    found = Simulation.from_batches(batches).run(slots, policy, ahead, warm)
    counts = [found.rows, found.new, found.misses, found.rows_in, found.rows_out, found.lookups]
    assert counts == planned(batches, slots, policy, ahead, warm)


def calls_of(work: Callable[[], object]) -> int:
    """Returns the number of Python and C function calls in `work`."""
    events: list[str] = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        work()
    finally:
        sys.setprofile(None)
    return sum(event in ("call", "c_call") for event in events)


def test_work_in_python_does_not_grow_with_the_trace() -> None:
    """The engine does all work per batch and per id; Python does a fixed number of calls for each cache size."""

    def calls(samples: int) -> int:
        ids = (2000 * np.random.default_rng(1).random(samples) ** 4).astype(np.int64)
        trace = TableTrace(ids, np.arange(samples + 1))
        return calls_of(lambda: simulate_table("t", trace, 50, [0.4, 0.7], ["lru", "lrfu"], 2, 8, iter))

    calls(1000)
    assert calls(50_000) == calls(1000) < 200


def test_a_progress_bar_counts_finished_caches(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bar = _progress_bar("t_item")
    assert list(bar([("lru", 1), ("lru", 2)])) == [("lru", 1), ("lru", 2)]
    assert capsys.readouterr().err == "", "no terminal"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert list(_progress_bar("t_item")([("lru", 1), ("lru", 2)])) == [("lru", 1), ("lru", 2)]
    assert "t_item:   0%" in capsys.readouterr().err


@pytest.mark.parametrize("starts", [[], [0], [1, 2], [0, 2, 1, 3], [0, 4]])
def test_invalid_batch_starts_are_refused(starts: list[int]) -> None:
    with pytest.raises(ValueError, match="starts must"):
        Simulation(np.arange(3), np.array(starts, np.int64))


def test_look_ahead_reduces_misses_with_announcements_only() -> None:
    simulation = Simulation.from_batches(batches_of(5, count=80))
    blind, one, ahead, most = (simulation.run(50, "look_ahead", n) for n in (0, 1, 2, MAX_AHEAD))
    lrfu = simulation.run(50, "lrfu", 2)
    assert most.misses < ahead.misses < one.misses < blind.misses
    assert blind.misses <= lrfu.misses * 1.05


def test_a_cache_for_all_rows_has_no_misses_of_known_rows() -> None:
    batches = batches_of(1)
    found = Simulation.from_batches(batches).run(distinct(batches), "lrfu", 0)
    assert found.miss_rate == 0
    assert found.misses == found.new == found.rows_in == distinct(batches)
    assert found.rows_out == 0


def counts(known_misses: int, rows: int = 100) -> Counts:
    return Counts(10, rows, 0, known_misses, known_misses, known_misses)


TABLES = [
    Table("a", 100, 100, 10, 8, [10, 50, 100], {"lrfu": [counts(90), counts(4), counts(0)]}),
    Table("b", 100, 100, 10, 80, [10, 50, 100], {"lrfu": [counts(50), counts(40), counts(0)]}),
]


LEAST = 10 * 8 + 10 * 80


@pytest.mark.parametrize(
    ("misses", "memory", "size_indices"),
    [
        (0.05, None, (1, 2)),  # without a memory limit, the advice allows few misses
        (0.0, None, (2, 2)),
        (0.9, None, (0, 0)),
        (0.05, LEAST, (0, 0)),  # the memory is given to the table in which it avoids the most misses
        (0.05, LEAST + 40 * 8, (1, 0)),
        (0.05, LEAST + 40 * 8 + 90 * 80, (1, 2)),
        (0.05, 1 << 20, (2, 2)),
    ],
)
def test_memory_goes_to_the_table_where_it_saves_most(
    misses: float, memory: int | None, size_indices: tuple[int, int]
) -> None:
    assert choose_cache(TABLES, SPEED, misses, memory).size_indices == dict(zip("ab", size_indices, strict=True))


def test_memory_below_the_smallest_caches() -> None:
    with pytest.raises(ValueError, match=f"--memory is {LEAST - 1} bytes, the smallest caches .* need {LEAST} bytes"):
        choose_cache(TABLES, SPEED, 0.05, LEAST - 1)


def test_the_better_policy_is_chosen() -> None:
    table = Table("a", 100, 100, 10, 8, [10, 50], {"lru": [counts(9), counts(3)], "lfu": [counts(4), counts(1)]})
    assert choose_cache([table], SPEED, 0.05, None) == choose_cache([table], SPEED, 0.05, 80)
    assert choose_cache([table], SPEED, 0.05, None).policy == "lfu"


def test_transfer_time_is_bytes_divided_by_bandwidth() -> None:
    found = Bandwidth(to_device=100.0, to_host=50.0, source="").seconds(Counts(4, 0, 0, 0, 10, 20), 8)
    assert found == pytest.approx((10 * 8 / 100 + 20 * 8 / 50) / 4)


def test_copies_are_measured(device: torch.device) -> None:
    found = measure_bandwidth(device)
    assert found.to_device > 1e6
    assert found.to_host > 1e6
    assert str(device).partition(":")[0] in found.source


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ([], [20, 25, 30, 37, 46, 56, 69, 85, 105, 129, 158, 195]),
        ([0.5, 1.0, 40, 1], [40, 98, 195]),
        ([0.001], [10]),
        ([1e9], [195]),
    ],
)
def test_requested_sizes_become_cache_sizes(wanted: list[float], expected: list[int]) -> None:
    found = cache_sizes(wanted, distinct=195, largest=10)
    assert found == sorted(set(found))
    assert found[0] == expected[0]
    assert found[-1] == expected[-1]
    if wanted:
        assert found == expected


def cut(trace: TableTrace, samples: int) -> list[list[int]]:
    """Returns the ids of each nonempty batch."""
    return [ids.tolist() for ids in np.split(trace.ids, trace.starts(samples)[1:-1])]


def test_arrays_of_any_shape(tmp_path: Path) -> None:
    flat, pairs = np.arange(6, dtype=np.int32), np.arange(6).reshape(3, 2)
    np.savez(tmp_path / "t.npz", a=flat, b=pairs, c=np.arange(5), c_offsets=np.array([0, 2, 2, 5]), d=np.ones(3))
    found = read_traces(tmp_path / "t.npz")
    assert set(found) == {"a", "b", "c"}
    assert {name: cut(trace, 2) for name, trace in found.items()} == {
        "a": [[0, 1], [2, 3], [4, 5]],
        "b": [[0, 1, 2, 3], [4, 5]],
        "c": [[0, 1], [2, 3, 4]],
    }


def test_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {"a": torch.tensor([3, -1]), "x": torch.ones(2, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "t.safetensors")
    found = read_traces(tmp_path / "t.safetensors")
    assert {name: trace.ids.tolist() for name, trace in found.items()} == {"a": [3, -1]}


def test_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    columns = {"a": [1, 2, 3], "b": [[1, 2], None, [3]], "c": ["x", "y", "z"]}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet", row_group_size=1)
    found = read_traces(tmp_path / "t.parquet")
    assert {name: cut(trace, 1) for name, trace in found.items()} == {"a": [[1], [2], [3]], "b": [[1, 2], [3]]}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.ones(3)}, "has no array or column of integers"),
        ({"a": np.zeros((2, 2, 2), np.int64)}, r"'a' has the shape \[2, 2, 2\]"),
        ({"a": np.arange(3), "a_offsets": np.array([0, 2])}, "must ascend from 0 to the number of ids, 3"),
        ({"a": np.arange(3), "a_offsets": np.array([0, 2, 1, 3])}, "must ascend"),
        ({"a": np.zeros((3, 1), np.int64), "a_offsets": np.array([0, 3])}, "must have one dimension"),
        ({"a": np.array([{}])}, "is not an .npz file of plain arrays"),
    ],
)
def test_invalid_traces_are_refused(arrays: dict[str, npt.NDArray[np.generic]], message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(TraceError, match=message):
        read_traces(tmp_path / "t.npz")


@pytest.mark.parametrize("ending", ["npz", "safetensors"])
def test_other_files_are_refused(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"t.{ending}"
    with pytest.raises(TraceError, match="there is no such file"):
        read_traces(path)
    path.write_text("no such thing")
    with pytest.raises(TraceError, match=f"is not a.* .{ending} file"):
        read_traces(path)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    batches = batches_of(9)
    np.savez(tmp_path / "trace.npz", t=np.concatenate(batches), u=np.arange(1200).reshape(-1, 2) % 17)
    return tmp_path / "trace.npz"


def advise(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main([*map(str, arguments), "--batch", "30", "--bandwidth", "10"]) == 0
    return capsys.readouterr().out


def test_the_advice_is_code_to_paste(trace: Path, capsys: pytest.CaptureFixture[str], device: torch.device) -> None:
    lines = advise(capsys, trace, "--dim", "4").splitlines()
    assert any("modelled, not measured" in line for line in lines)
    given = eval(f"dict({lines[-1]})")
    assert set(given) == {"cache", "cache_policy"}
    tables = [TableConfig(name, 100, 4) for name in ("t", "u")]
    sizes = TableBatchedEmbedding(tables, device=device, **given).cache_sizes
    assert sizes == given["cache"] or list(sizes) == list(given["cache"].values())


def test_options_of_the_command(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = advise(capsys, trace, "--table", "u", "--policies", "lru", "--sizes", "17", "--optimizer", "Adam")
    assert "table t:" not in text
    assert text.splitlines()[-1] == "cache={'u': 17}, cache_policy='lru'"
    assert f"{17 * 3 * 64 * 4 / 2**20:.2f} MiB" in text, "64 elements of 4 bytes, and two states of each"
    assert "use rec_sdk_torch.prefetch(depth=3)" in advise(capsys, trace, "--policies", "look_ahead", "--ahead", "3")


@pytest.mark.parametrize(
    ("given", "speed"), [("10", 1e10), ("0.5", 5e8), ("10GB", 1e10), ("2 GiB/s", 2**31), ("800MB/s", 8e8)]
)
def test_units_of_the_bandwidth(given: str, speed: float, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(trace), "--batch", "30", "--sizes", "1", "--bandwidth", given]) == 0
    assert f"{speed / 1e9:.2f} GB/s to the device, {speed / 1e9:.2f} GB/s back" in capsys.readouterr().out


@pytest.mark.parametrize("given", ["0", "-1", "nan", "9" * 400, "9" * 400 + "GB", "fast", "10 GHz"])
def test_an_invalid_bandwidth_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["trace.npz", f"--bandwidth={given}"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "--bandwidth" in line


def test_plots(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "misses.png"
    assert advise(capsys, trace, "--plot", picture, "--sizes", "0.5,1").splitlines()[-1] == f"drawn: {picture}"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([str(trace), "--plot", str(tmp_path / "x.nothing"), "--bandwidth", "1"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--table", "x"], "has no ['x'], only ['t', 'u']"),
        (["--optimizer", "NoSuch"], "--optimizer is 'NoSuch'"),
        (["--optimizer", "LBFGS"], "LBFGS"),
        (["--policies", "no_such"], "no ['no_such'], only"),
        (["--memory", "1"], "the smallest caches of the 2 tables need"),
        (["--memory", "much"], "--memory: expected a size"),
        (["--memory", "9" * 400], "--memory: expected a size in bytes such as '2GiB' or '17179869184', below 2^63"),
        (["--ahead", "16"], "it must be at most 15"),
        (["--dim", "100000"], "100000"),
        (["--device", "tpu"], "tpu"),
    ],
)
def test_wrong_options_are_one_line(
    trace: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(trace), *arguments]) == 1
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert message in line


def test_a_trace_includes_its_incomplete_last_batch() -> None:
    trace = TableTrace(np.arange(5, dtype=np.int64), np.arange(6, dtype=np.int64))
    assert cut(trace, 2) == [[0, 1], [2, 3], [4]]
