"""The whole-job example: a killed and restarted job ends bit-identical to an uninterrupted job; a server follows it.

The reference is the same job without interruption. Rows, states and dense weights are read from the job's last version.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forked_python
import pytest
import torch

from rec_sdk_torch.operators.devices.backends import parse_device

pytest.importorskip("torchrec")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "whole_job.py"
SMALL = ("--samples", "3000", "--batch-size", "32", "--dim", "8", "--save-every", "8", "--full-every", "3")
STEPS = 40
"""The number of steps. Saves follow every 8 steps, every third one full: full, delta, delta, full, delta."""


def run(ranks: int, *arguments: str | Path, code: int = 0) -> str:
    """Runs the script on `ranks` ranks; returns its output. It must exit with `code`."""
    start = (
        forked_python.python
        if ranks == 1
        else (lambda *given, **variables: forked_python.torchrun(ranks, *given, **variables))
    )
    finished: subprocess.CompletedProcess[str] = start(SCRIPT, *arguments, PYTHONPATH=str(ROOT))
    assert finished.returncode == code, finished.stdout + finished.stderr
    return finished.stdout


def train(
    folder: Path, ranks: int, device: torch.device, *arguments: str | Path, steps: int = STEPS, code: int = 0
) -> str:
    given = ("train", folder, *SMALL, "--steps", str(steps), "--device", device.type)
    return run(ranks, *given, *arguments, code=code)


def needs_ranks(device: torch.device, ranks: int) -> None:
    if device.type != "cpu" and torch.get_device_module(device).device_count() < ranks:
        pytest.skip("two ranks need two devices")


@pytest.fixture
def job_modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports the example's own modules."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from job import clicks, model, versions

    class Parts:
        Clicks = clicks.Clicks
        build_tables = staticmethod(model.build_tables)
        latest_name = staticmethod(versions.latest_name)
        read_version = staticmethod(versions.read_version)

    return Parts


def tensors(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a state, by path."""
    items = state.items() if isinstance(state, dict) else enumerate(state)
    for key, value in items:
        if isinstance(value, dict | list | tuple):
            yield from tensors(value, f"{name}.{key}")
        else:
            yield f"{name}.{key}", value


def last_version(folder: Path, job_modules: Any) -> dict[str, Any]:
    """Reads the complete last version: rows and states by ascending id, and all state outside the tables.

    The version is loaded into a model of one rank on the CPU, whatever devices and ranks trained it.
    """
    from rec_sdk_torch import Saver

    version = job_modules.read_version(folder, job_modules.latest_name(folder))
    tables = job_modules.build_tables(job_modules.Clicks(3000, 0, 32).data, 8, 0, 1.0, 32, 0.05)
    Saver().load(tables, version.tables)
    found = dict(tensors({key: version.state[key] for key in ("step", "dense", "optimizer", "answers")}))
    for table in tables.cache_sizes:
        view = tables.embedding.view(table)
        ids = tables.table_ids(table).sort().values
        found[f"{table}.ids"] = ids
        found |= {f"{table}.{part}": value for part, value in view.read(ids, list(view.parts())).parts.items()}
    return found


def is_same_state(left: dict[str, Any], right: dict[str, Any]) -> bool:
    assert left.keys() == right.keys()
    for name, value in left.items():
        other = right[name]
        equal = torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
        assert equal, name
    return True


@pytest.fixture(scope="module")
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs a job of one rank from the first to the last step, which no test changes; its result is in the
    parent folder.
    """
    folder = tmp_path_factory.mktemp("whole") / "job"
    train(folder, 1, parse_device(request.config.getoption("--device")), "--json", folder.parent / "end.json")
    return folder


@pytest.fixture
def copy(job: Path, tmp_path: Path) -> Path:
    """Copies that job, for tests that change it."""
    return Path(shutil.copytree(job, tmp_path / "copy"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_job_ends_with_the_same_bits(
    tmp_path: Path, device: torch.device, job_modules: Any, ranks: int, request: pytest.FixtureRequest
) -> None:
    needs_ranks(device, ranks)
    if ranks == 1:
        whole = request.getfixturevalue("job")
    else:
        whole = tmp_path / "whole" / "job"
        whole.parent.mkdir()
        train(whole, ranks, device, "--json", tmp_path / "whole" / "end.json")
    killed = tmp_path / "job"
    assert "goes on" not in train(killed, ranks, device, "--kill-at", "21", code=-signal.SIGKILL)
    printed = train(killed, ranks, device, "--json", tmp_path / "end.json")
    assert re.search(r"^goes on behind step (8|16), ", printed, re.MULTILINE), printed
    of_whole, of_killed = (json.loads((folder.parent / "end.json").read_text()) for folder in (whole, killed))
    assert of_whole["from"] == 0 < of_killed["from"]
    assert of_whole["auc"] == of_killed["auc"] > 0.5
    assert of_whole["cache"]["rows_out"] > 0, "the caches hold all rows"
    assert [step for step, _ in of_whole["scalars"]["embeddings/hit_rate"]] == [10, 20, 30, 40]
    states = last_version(whole, job_modules)
    assert {name.rpartition(".")[2] for name in states if name.startswith("user.")} == {"ids", "weight", "sum"}
    assert is_same_state(states, last_version(killed, job_modules))


def test_a_save_without_the_rest_of_its_version(job: Path, copy: Path, device: torch.device, job_modules: Any) -> None:
    """A kill between the two parts of a version leaves only the save: the job resumes from the previous version."""
    left = job_modules.latest_name(copy)
    (copy / "versions" / f"{left}.pt").unlink()
    assert (copy / "tables" / left).is_dir()
    assert "goes on behind step 32, " in train(copy, 1, device)
    assert job_modules.latest_name(copy) > left
    assert is_same_state(last_version(job, job_modules), last_version(copy, job_modules))


def test_a_server_follows_the_versions(tmp_path: Path, device: torch.device) -> None:
    """The server runs while the job trains.

    It would exit with 2 if a version's outputs differed from the live model's.
    """
    folder = tmp_path / "job"
    train(folder, 1, device, steps=16)
    with ThreadPoolExecutor(1) as pool:
        server = pool.submit(run, 1, "serve", folder, "--until", str(STEPS))
        train(folder, 1, device)
        printed = server.result()
    lines = [line.split() for line in printed.splitlines()]
    steps = [int(line[1].rstrip(":")) for line in lines]
    assert steps == sorted(set(steps))
    assert steps[-1] == STEPS
    assert all(line[2:4] == ["32", "requests"] for line in lines)


def test_a_damaged_version_is_not_served(copy: Path, job_modules: Any) -> None:
    """A damaged version's outputs differ from the live model's, so the server refuses the version."""
    latest = run(1, "serve", copy)
    assert re.fullmatch(r"step 40: 32 requests in [\d.]+ ms from \S+, at most \S+ from the live model\n", latest)
    version = job_modules.read_version(copy, job_modules.latest_name(copy))
    version.state["dense"]["top.1.bias"] += 0.1
    torch.save(version.state, copy / "versions" / f"{version.tables.name}.pt")
    assert_refused(["serve", copy], "answers differ by", "from the live model's")


WRITER = """
import runpy, sys, types
class SummaryWriter:
    def __init__(self, folder, purge_step):
        self.file = open(folder, "a")
        print("purge", purge_step, file=self.file)
    def add_scalar(self, tag, value, step):
        print(tag, step, file=self.file)
    def close(self):
        self.file.close()
sys.modules["torch.utils.tensorboard"] = {module}
sys.path.insert(0, sys.argv[1].rpartition("/")[0])
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A program that runs a script with a stand-in for TensorBoard's writer, since the tests do not require TensorBoard."""


def with_writer(module: str, folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    code = WRITER.replace("{module}", module)
    return forked_python.python("-c", code, SCRIPT, "train", folder, *SMALL, *arguments, PYTHONPATH=str(ROOT))


def test_curves_continue_after_a_kill(tmp_path: Path) -> None:
    """The plot and the scalars of a resumed job cover the steps of all its processes."""
    folder, events, picture = tmp_path / "job", tmp_path / "events", tmp_path / "run.png"
    module = "types.SimpleNamespace(SummaryWriter=SummaryWriter)"
    options = ("--steps", "30", "--log-every", "5", "--tensorboard", events)
    assert with_writer(module, folder, *options, "--kill-at", "22").returncode == -signal.SIGKILL
    finished = with_writer(module, folder, *options, "--plot", picture, "--json", tmp_path / "end.json")
    assert finished.returncode == 0, finished.stderr
    result = json.loads((tmp_path / "end.json").read_text())
    begin = result["from"]
    points = [step for step, _ in result["scalars"]["embeddings/user/hit_rate"]]
    assert points == list(range(5, begin + 1, 5)) + list(range(begin + 5, 31, 5))
    written = events.read_text().splitlines()
    assert [line for line in written if line.startswith("purge")][-1] == f"purge {begin + 1}"
    assert written[-1].endswith(f" {points[-1]}")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_missing_tensorboard_is_refused(tmp_path: Path) -> None:
    finished = with_writer("None", tmp_path / "job", "--steps", "1", "--tensorboard", tmp_path / "events")
    assert finished.returncode == 2
    # Before anything is created: ranks are refused together.
    assert not (tmp_path / "job").exists()
    message = "whole_job.py: --tensorboard needs the package tensorboard: pip install tensorboard"
    assert finished.stderr.splitlines()[-1] == message


def assert_refused(arguments: list[Any], *words: str) -> None:
    finished = forked_python.python(SCRIPT, *arguments, PYTHONPATH=str(ROOT))
    assert finished.returncode == 2, finished.stdout + finished.stderr
    assert "Traceback" not in finished.stderr
    # One line of ours; torch_npu prints its own warnings.
    (line,) = [line for line in finished.stderr.splitlines() if line.startswith("whole_job.py: ")]
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "{}/nowhere"], ["nowhere has no version of a model yet", "whole_job.py train"]),
        (["train", "{}/file/job"], ["cannot write {}/file/job: Not a directory"]),
        (["train", "{}/job", "--kill-at", "9", "--steps", "8"], ["--kill-at 9", "8 --steps"]),
        (["train", "{}/job", "--plot", "{}/run.pdf"], ["run.pdf: the name must end in .png"]),
        (["train", "{}/job", "--json", "{}/no/end.json"], ["end.json", "folder does not exist"]),
        (["train", "{}/job", "--samples", "50"], ["--batch-size 64", "the 40 clicks", "--samples 50"]),
        (["train", "{}/job", "--depth", "13"], ["--depth", "13"]),
        (["train", "{}/job", "--device", "{other}"], ["--device {other}: torch sees no such device here"]),
        ([], ["train | serve"]),
    ],
)
def test_wrong_input_is_one_line(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    (tmp_path / "file").touch()
    other = "npu" if torch.cuda.is_available() else "cuda"
    given, expected = ([text.format(tmp_path, other=other) for text in texts] for texts in (arguments, words))
    assert_refused(given, *expected)


def test_ranks_are_refused_together(tmp_path: Path) -> None:
    """Both ranks report the error that only rank 0 detects, and neither rank hangs."""
    (tmp_path / "file").touch()
    finished = forked_python.torchrun(2, SCRIPT, "train", tmp_path / "file" / "job", *SMALL, PYTHONPATH=str(ROOT))
    assert finished.returncode == 2
    assert finished.stderr.splitlines() == [f"whole_job.py: cannot write {tmp_path}/file/job: Not a directory"] * 2


def test_changed_options_of_a_resumed_job_are_refused(copy: Path, device: torch.device, job_modules: Any) -> None:
    """Options of the first start apply: otherwise the tables would silently keep their own learning rate."""
    given = ["train", copy, *SMALL, "--device", device.type]
    assert_refused([*given, "--sparse-lr", "0.1"], "is a job with --sparse-lr 0.05, not 0.1")
    assert_refused([*given, "--kill-at", "40"], "--kill-at 40: the job goes on behind step 40")
    assert "step 40 is saved: nothing to train up to --steps 5" in train(copy, 1, device, steps=5)
    file = copy / "versions" / f"{job_modules.latest_name(copy)}.pt"
    file.write_bytes(file.read_bytes()[:-3000])
    assert_refused(given, f"cannot read {file}: damaged")
