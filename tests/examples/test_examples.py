"""Each example, run in a process as a user would run it: exit code, messages and JSON."""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import os
import random
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import forked_python
import pytest
import torch

pytest.importorskip("torchrec")

ROOT = Path(__file__).parents[2]
GENERATED = ["--samples", "12000", "--batch-size", "32"]


def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return forked_python.python(ROOT / "examples" / script, *arguments, PYTHONPATH=str(ROOT))


def results(folder: Path, script: str, *arguments: str | Path) -> dict[str, Any]:
    file = folder / "results.json"
    finished = run(script, *arguments, "--json", file)
    assert finished.returncode == 0, finished.stderr
    content: dict[str, Any] = json.loads(file.read_text())
    return content | {"stdout": finished.stdout, "stderr": finished.stderr}


def assert_swapped(report: dict[str, Any]) -> None:
    """Checks that the cache has spilled rows and fetched them again, because tables are larger than the cache."""
    stats = report["cached"]["cache"]
    assert stats["rows_out"] > 0
    assert stats["rows_in"] > stats["new_rows"]  # some fetched rows had been cached before
    assert 0 < stats["unique_misses"] < stats["unique_rows"] <= stats["lookups"]
    assert any(table["cache_rows"] < table["rows"] for table in report["tables"].values())


# ---------------------------------------------------------------- data files


def write_movielens(folder: Path, users: int = 300, items: int = 400, ratings: int = 3000) -> Path:
    """Writes ratings whose only signal is that some films are better than others. One odd line is copied from the real
    files.
    """
    draw = random.Random(1)
    goodness = [draw.gauss(0, 1) for _ in range(items)]
    lines = []
    for time in range(ratings):
        user, item = draw.randrange(users), draw.randrange(items)
        stars = min(5, max(1, round(3.5 + 1.2 * goodness[item] + draw.gauss(0, 0.5))))
        lines.append(f"{user + 1}\t{item + 1}\t{stars}\t{880000000 + time}\n")
    (folder / "u.data").write_text("".join(lines))
    (folder / "u.user").write_text(
        "".join(f"{u + 1}|{15 + u % 50}|{'MF'[u % 2]}|job{u % 9}|{10000 + u % 90}\n" for u in range(users))
    )
    rows = []
    for item in range(items):
        released = "" if item == 7 else f"01-Jan-{1950 + item % 45}"
        flags = "|".join(str(int(genre in (item % 19, item % 7))) for genre in range(19))
        rows.append(f"{item + 1}|Amélie {item}|{released}||http://x|{flags}\n")
    (folder / "u.item").write_text("".join(rows), encoding="latin-1")
    return folder


def criteo_rows(count: int = 323) -> list[list[str]]:
    draw = random.Random(2)
    rows = []
    for _ in range(count):
        category = draw.randrange(20)
        counts = [draw.choice(["", "0", "3", "1500", "-1"]) for _ in range(13)]
        categories = [f"{category:08x}"] + [draw.choice(["", f"{draw.randrange(999):08x}"]) for _ in range(25)]
        rows.append([str(int(category < 10)), *counts, *categories])
    return rows


CRITEO_HEADER = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]


def write_criteo(path: Path, rows: list[list[str]], separator: str = "\t") -> Path:
    text = "".join(separator.join(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


# ---------------------------------------------------------------- train_dlrm.py


def test_dlrm_learns_generated_clicks_through_a_small_cache(tmp_path: Path) -> None:
    plot = tmp_path / "run.png"
    report = results(tmp_path, "train_dlrm.py", *GENERATED, "--batch-size", "64", "--epochs", "2", "--plot", plot)
    assert report["cached"]["test"]["auc"] > 0.65
    assert_swapped(report)
    assert plot.read_bytes().startswith(b"\x89PNG")
    curves = report["cached"]["curves"]
    assert curves["loss"][-1] < curves["loss"][0]
    assert len(curves["hit_rate"]) == len(curves["steps"])
    assert 3 <= len(curves["validation_auc"]) <= 10
    for word in ("loss=", "samples/s=", "cache hits="):
        assert word in report["stderr"]
    for word in ("test AUC", "log loss", "rows out", "peak memory"):
        assert word in report["stdout"]
    # Without a terminal, the log has a line per evaluation, no progress bar, and no warning from torch.
    lines = report["stderr"].splitlines()
    assert len(lines) == len(curves["validation_auc"])
    assert all(line.startswith("cached: step ") and "\r" not in line for line in lines), report["stderr"]
    cached = report["cached"]
    assert cached["seconds"] > cached["training_seconds"] > 0
    assert (
        f"steps in {cached['seconds']:.1f} s, of which training {cached['training_seconds']:.1f} s" in report["stdout"]
    )


def test_a_hit_rate_covers_the_time_since_the_last_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from support.training import Monitor
    from tqdm import tqdm

    counted = [(10, 8), (30, 13), (30, 13), (50, 13)]  # distinct rows and misses so far
    stats = iter([{"unique_rows": rows, "unique_misses": misses} for rows, misses in counted])
    monitor = Monitor(tqdm([], disable=True), "cached", len(counted), lambda: next(stats), quiet=True)
    for number in range(len(counted)):
        monitor.record(number + 1, torch.tensor(0.5), samples=1, seconds=1.0)
    assert monitor.curves.hit_rate == pytest.approx([0.2, 0.75, 0.0, 1.0])


def test_dlrm_repeats_itself_with_another_cache(tmp_path: Path) -> None:
    short = [*GENERATED, "--steps", "60"]
    first = results(tmp_path, "train_dlrm.py", *short, "--seed", "5")["cached"]
    other_cache = results(tmp_path, "train_dlrm.py", *short, "--seed", "5", "--cache", "1.0")["cached"]
    other_seed = results(tmp_path, "train_dlrm.py", *short, "--seed", "6")["cached"]
    assert first["test"] == other_cache["test"] != other_seed["test"]
    assert other_cache["cache"]["rows_out"] == 0


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam", "rowwise_adagrad"])
def test_dlrm_matches_plain_tables(tmp_path: Path, optimizer: str) -> None:
    report = results(tmp_path, "train_dlrm.py", *GENERATED, "--steps", "100", "--optimizer", optimizer, "--baseline")
    assert abs(report["auc_difference"]) <= 0.001
    assert report["cached"]["curves"]["loss"] == pytest.approx(report["plain"]["curves"]["loss"], abs=1e-3)
    assert_swapped(report)


def run_ranks(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return forked_python.torchrun(2, ROOT / "examples" / script, *arguments, PYTHONPATH=str(ROOT))


def test_dlrm_on_two_ranks_learns_what_one_learns(tmp_path: Path) -> None:
    """Each rank has half of every batch, and half of the rows."""
    short = ["--samples", "12000", "--steps", "100", "--optimizer", "adagrad"]
    alone = results(tmp_path, "train_dlrm.py", *short, "--batch-size", "64")
    file = tmp_path / "ranks.json"
    finished = run_ranks("train_dlrm.py", *short, "--batch-size", "32", "--json", file)
    assert finished.returncode == 0, finished.stderr
    ranks = json.loads(file.read_text())
    assert ranks["cached"]["curves"]["loss"] == pytest.approx(alone["cached"]["curves"]["loss"], abs=1e-3)
    assert ranks["cached"]["test"]["auc"] == pytest.approx(alone["cached"]["test"]["auc"], abs=1e-3)
    assert ranks["cached"]["cache"]["unique_rows"] < 0.75 * alone["cached"]["cache"]["unique_rows"]
    assert finished.stdout.count("test AUC") == 1
    assert finished.stderr.count("cached: step ") == len(ranks["cached"]["curves"]["validation_auc"])


def test_dlrm_on_two_ranks_has_no_baseline() -> None:
    finished = run_ranks("train_dlrm.py", "--samples", "500", "--baseline")
    assert finished.returncode != 0
    assert "--baseline is for a single process, not for the 2 of torchrun" in finished.stderr


def test_dlrm_on_movielens_matches_plain_tables_and_learns_as_much_with_16_bits(tmp_path: Path) -> None:
    # With fewer ratings the AUC itself is too coarse.
    options = ["--movielens", write_movielens(tmp_path, ratings=6000), "--batch-size", "16", "--epochs", "2"]
    report = results(tmp_path, "train_dlrm.py", *options, "--baseline")
    full = report["cached"]["test"]["auc"]
    assert full > 0.7
    assert abs(report["auc_difference"]) <= 0.002
    assert set(report["tables"]) == {"user", "item", "genre", "age", "occupation", "zip"}
    assert_swapped(report)
    # The generated file has few clicks to test with: on MovieLens-100K itself the difference is below 0.0005.
    for name in ("bf16", "fp16"):
        half = results(tmp_path, "train_dlrm.py", *options, "--weights", name)["cached"]["test"]["auc"]
        assert full != half == pytest.approx(full, abs=0.005)


def test_dlrm_learns_from_a_criteo_file(tmp_path: Path) -> None:
    rows = criteo_rows()
    file = write_criteo(tmp_path / "clicks.tsv.gz", rows)
    report = results(tmp_path, "train_dlrm.py", "--criteo", file, "--batch-size", "16", "--epochs", "10")
    assert report["cached"]["test"]["auc"] > 0.7
    assert len(report["tables"]) == 26
    assert report["tables"]["C1"]["rows"] == len({row[14] for row in rows})
    assert_swapped(report)


def test_dlrm_survives_a_file_without_clicks(tmp_path: Path) -> None:
    file = write_criteo(tmp_path / "clicks.tsv", [["0", *row[1:]] for row in criteo_rows(10)])
    report = results(tmp_path, "train_dlrm.py", "--criteo", file, "--baseline", "--plot", tmp_path / "run.png")
    assert report["cached"]["test"]["auc"] is None
    assert report["auc_difference"] is None
    assert "n/a" in report["stdout"]


# ---------------------------------------------------------------- train_sequence.py


def test_sequence_learns_generated_histories_through_a_small_cache(tmp_path: Path) -> None:
    options = ["--samples", "8000", "--batch-size", "32", "--epochs", "2"]
    report = results(tmp_path, "train_sequence.py", *options, "--plot", tmp_path / "run.png")
    assert report["cached"]["test"]["auc"] > 0.57
    assert_swapped(report)
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_sequence_on_movielens_repeats_itself(tmp_path: Path) -> None:
    data = write_movielens(tmp_path)
    options = ["--movielens", data, "--batch-size", "16", "--history", "5"]
    first, again = (results(tmp_path, "train_sequence.py", *options) for _ in range(2))
    assert first["cached"]["test"]["auc"] > 0.7
    assert first["cached"]["test"] == again["cached"]["test"]
    assert_swapped(first)


# ---------------------------------------------------------------- wrong input


def assert_refused(finished: subprocess.CompletedProcess[str], *words: str) -> None:
    assert finished.returncode == 2
    assert "Traceback" not in finished.stderr
    assert len(finished.stderr.strip().splitlines()) == 1
    for word in words:
        assert word in finished.stderr


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("train_dlrm.py", ["--movielens", "{}/nowhere"], ["nowhere", "u.data"]),
        ("train_sequence.py", ["--movielens", "{}/nowhere"], ["nowhere", "u.data"]),
        ("train_dlrm.py", ["--json", "{}/no/results.json"], ["results.json", "folder does not exist"]),
        ("train_dlrm.py", ["--plot", "{}/run.xyz"], ["run.xyz", ".png", ".pdf"]),
        ("train_dlrm.py", ["--cache", "1.5"], ["--cache", "at most 1"]),
        ("train_dlrm.py", ["--samples", "1"], ["--samples", "1 is not allowed; at least 10 is"]),
        ("train_dlrm.py", ["--nothing"], ["--nothing"]),
    ],
)
def test_wrong_options_are_refused_before_the_training(
    tmp_path: Path, script: str, arguments: list[str], words: list[str]
) -> None:
    assert_refused(run(script, *(text.format(tmp_path) for text in arguments)), *words)


def test_a_second_process_serves_what_is_trained() -> None:
    finished = run("serve.py", "--steps", "30", "--saves", "3")
    assert finished.returncode == 0, finished.stderr
    lines = [line for line in finished.stdout.splitlines() if line.startswith("save")]
    assert len(lines) == 3
    assert all(line.endswith("rows, served as trained: True") for line in lines)


@pytest.mark.parametrize(("bits", "most"), [(None, 1e-6), (4, 0.05)])
def test_a_whole_model_is_deployed(bits: int | None, most: float) -> None:
    options = [] if bits is None else ["--bits", str(bits)]
    finished = run("deploy.py", "--samples", "6000", *options)
    assert finished.returncode == 0, finished.stderr
    lines = [line.split() for line in finished.stdout.splitlines() if line.startswith("version")]
    assert [line[:4] for line in lines] == [["version", f"{n}:", "256", "answers,"] for n in range(2)]
    differences = [float(line[6]) for line in lines]
    assert all(0 <= difference <= most for difference in differences)
    assert bits is None or min(differences) > 0, "rows of fewer bits are served"


def test_a_full_disk_is_reported() -> None:
    """A full disk cannot be predicted; output printed before the error is kept."""
    finished = run("train_dlrm.py", "--samples", "500", "--json", "/dev/full")
    assert finished.returncode == 2
    assert "peak memory" in finished.stdout
    assert finished.stderr.splitlines()[-1] == "train_dlrm.py: cannot write /dev/full: No space left on device"
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize(
    ("reader", "message"),
    [("| true", "the output was closed before the end"), ("> /dev/full", "cannot write the output: No space left")],
)
def test_a_closed_output_pipe(reader: str, message: str) -> None:
    script = ROOT / "examples" / "train_sequence.py"
    command = f"{sys.executable} {script} --samples 500 --steps 2 {reader}"
    finished = subprocess.run(
        command, shell=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert finished.stderr.splitlines()[-1].startswith(f"train_sequence.py: {message}"), finished.stderr
    assert "Traceback" not in finished.stderr
    assert "Exception ignored" not in finished.stderr


def test_ctrl_c_ends_a_script_with_one_line() -> None:
    command = [sys.executable, str(ROOT / "examples" / "train_dlrm.py"), "--samples", "100000", "--steps", "600"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes: dict[str, Any] = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    # Tests that a shell runs in the background ignore the signal, and so would child processes.
    ready = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, env=environment, preexec_fn=ready, **pipes) as run:  # noqa: PLW1509
        assert run.stderr
        first = run.stderr.readline()  # of the first evaluation
        run.send_signal(signal.SIGINT)
        rest = run.stderr.read()
    assert first.startswith("cached: step "), first + rest
    assert rest.splitlines()[-1] == "train_dlrm.py: interrupted", rest
    assert "Traceback" not in rest
    assert run.returncode == -signal.SIGINT


@pytest.mark.parametrize("script", ["train_dlrm.py", "train_sequence.py", "train_npu.py"])
def test_a_python_without_torch_is_reported(script: str) -> None:
    """Emulates a Python without torch, such as the system's: `-S` hides installed packages."""
    file = ROOT / "examples" / script
    finished = subprocess.run([sys.executable, "-S", file], capture_output=True, text=True, check=False)
    assert_refused(finished, f"{sys.executable} has no torch", f"{ROOT}/.venv/bin/python {file}")


@pytest.mark.skipif(find_spec("torch_npu") is not None, reason="torch_npu is here")
def test_the_example_for_npus_without_torch_npu() -> None:
    assert_refused(run("train_npu.py"), "torch_npu is not installed", f"make -C {ROOT} build-npu")


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports the modules of the examples, so that a test of many wrong files needs no process for each."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from dlrm import data_criteo, data_movielens
    from support import clicks, errors

    class Readers:
        criteo = staticmethod(data_criteo.criteo_clicks)
        movielens = staticmethod(data_movielens.movielens_clicks)
        split = staticmethod(clicks.random_split)
        InputError = errors.InputError

    return Readers


@pytest.mark.parametrize(
    ("file", "line", "words"),
    [
        ("u.data", "1\t2\tfive\t3\n", ["u.data, line 1", "five"]),
        ("u.data", "9999\t1\t5\t3\n", ["u.user", "user 9999"]),
        ("u.data", "1\t9999\t5\t3\n", ["u.item", "item 9999"]),
        ("u.user", "1|24|M\n", ["u.user, line 1"]),
        ("u.item", "1|Toy Story|01-Jan-1995||http://x|0|1\n", ["u.item, line 1", "2 genre flags"]),
        ("u.item", None, ["u.item", "No such file"]),
    ],
)
def test_wrong_movielens_files_are_named(
    tmp_path: Path, readers: Any, file: str, line: str | None, words: list[str]
) -> None:
    folder = write_movielens(tmp_path, ratings=20)
    if line is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(line)
    with pytest.raises(readers.InputError) as refused:
        readers.movielens(folder)
    for word in words:
        assert word in str(refused.value)
    assert "\n" not in str(refused.value)


def test_criteo_files_of_all_forms_are_one_log(tmp_path: Path, readers: Any) -> None:
    rows = criteo_rows(20)
    tabs = readers.criteo(write_criteo(tmp_path / "clicks.tsv", rows))
    others = [
        readers.criteo(write_criteo(tmp_path / "clicks.tsv.gz", rows)),
        readers.criteo(write_criteo(tmp_path / "clicks.csv", [CRITEO_HEADER, *rows], ",")),
    ]
    for other in others:
        assert torch.equal(other.dense, tabs.dense)
        assert torch.equal(other.labels, tabs.labels)
        assert all(torch.equal(other.features[name].values, ids.values) for name, ids in tabs.features.items())


def wrong_criteo(kind: str) -> list[list[str]]:
    good = criteo_rows(12)
    return {
        "empty": [],
        "columns": [row[:5] for row in good],
        "ragged": [*good, good[0][:-1]],
        "label": [*good, ["2", *good[0][1:]]],
        "number": [*good, ["1", "many", *good[0][2:]]],
        "header": [[name for name in CRITEO_HEADER if name not in ("I3", "C7")]],
    }[kind]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("empty", ["empty"]),
        ("columns", ["5 columns in line 1", "40"]),
        ("ragged", ["line 13", "39 columns"]),
        ("label", ["line 13", "label", "'2'"]),
        ("number", ["line 13", "I1", "'many'"]),
        ("header", ["I3, C7"]),
    ],
)
def test_wrong_criteo_files_are_named(tmp_path: Path, readers: Any, kind: str, words: list[str]) -> None:
    file = write_criteo(tmp_path / "clicks.tsv", wrong_criteo(kind))
    with pytest.raises(readers.InputError) as refused:
        readers.criteo(file)
    for word in [str(file), *words]:
        assert word in str(refused.value)
    assert "\n" not in str(refused.value)


def test_unreadable_criteo_files_are_named(tmp_path: Path, readers: Any) -> None:
    damaged = write_criteo(tmp_path / "clicks.tsv.gz", criteo_rows(50))
    damaged.write_bytes(damaged.read_bytes()[:-200])
    for file in (damaged, tmp_path / "nowhere.tsv", tmp_path):
        with pytest.raises(readers.InputError, match=str(file)):
            readers.criteo(file)


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("log_size", "9", "9 is not allowed; at least 10 is"),
        ("dimension", "5000", "5000 is not allowed; 1 to 4096 are"),
        ("dimension", "0", "0 is not allowed"),
        ("dimension", "16.0", "'16.0' is not a whole number"),
        ("seed", "-1", "-1 is not allowed"),
        ("seed", str(2**64), "is not allowed; 0 to 9223372036854775807 are"),
        ("positive_int", "many", "'many' is not a whole number"),
        ("positive_float", "fast", "'fast' is not a number"),
        ("positive_float", "nan", "nan is not allowed"),
        ("fraction", "all", "'all' is not a number"),
    ],
)
def test_wrong_numbers(readers: Any, option: str, text: str, message: str) -> None:
    from support import options

    with pytest.raises(argparse.ArgumentTypeError, match=message):
        getattr(options, option)(text)


def test_too_few_rows_are_refused(readers: Any) -> None:
    with pytest.raises(readers.InputError, match="9 rows are too few"):
        readers.split(9, seed=0)
