"""Options and fixtures that all tests share."""

from __future__ import annotations

import passive_threads  # noqa: F401  # before torch, which reads what it sets

# isort: split
import ast
import os
import shutil
import sys
from collections.abc import Iterator
from datetime import date
from importlib.util import find_spec
from pathlib import Path

import default_operators
import pytest
import torch
from folder_durations import NEEDS_FULL, Durations

from rec_sdk_torch import emulate
from rec_sdk_torch.operators.devices.backends import parse_device

HERE = Path(__file__).parent
MEMORY = Path("/dev/shm")
"""The folder of the tests' files if it is large enough: on a disk, a small save mostly waits for the disk."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="device of the operator and module tests (default: cpu)")
    parser.addoption(
        "--operators",
        choices=("kernels", "default"),
        default="kernels",
        help="default: in plain torch, as on a device without kernels (default: kernels)",
    )
    parser.addoption("--full", action="store_true", help="also run what is repetition, or takes minutes")
    parser.addoption("--scenarios", type=int, help="random scenarios of each oracle test (default: its own number)")
    parser.addoption("--day", type=int, default=date.today().toordinal(), help="seeds of that day (default: today's)")


def has_room(folder: Path) -> bool:
    """Returns whether `folder` has 8 GiB of free space and allows programs to be executed from it."""
    return (
        folder.is_dir()
        and shutil.disk_usage(folder).free > 8 << 30
        and not os.statvfs(folder).f_flag & os.ST_NOEXEC
        and os.access(folder, os.W_OK)
    )


def pytest_configure(config: pytest.Config) -> None:
    if has_room(MEMORY):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
    os.environ["PYTHONFAULTHANDLER"] = "1"  # makes processes of ranks print a traceback when they abort
    config.addinivalue_line("markers", "full: repetition, many seconds or much memory; runs with --full")
    config.pluginmanager.register(Durations(), "times")
    config.addinivalue_line("markers", "contents: bad contents of index tensors, which only the CPU looks for")
    config.addinivalue_line("markers", "kernels: about kernels, not about the operators in plain torch")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skips = {}
    if not config.getoption("--full"):
        skips["full"] = NEEDS_FULL
    if config.getoption("--operators") == "default":
        skips["kernels"] = "about kernels"
    elif config.getoption("--device") != "cpu":
        skips["contents"] = "contents are checked on the CPU only; elsewhere they would have to be read back"
    for item in items:
        for marker in skips.keys() & set(item.keywords):
            item.add_marker(pytest.mark.skip(reason=skips[marker]))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignores the tests of the emulated NPU unless `--device npu` is set."""
    emulator = collection_path == HERE / "emulator"
    return True if emulator and config.getoption("--device") != "npu" else None


@pytest.fixture(autouse=True)
def _process_stays() -> Iterator[None]:
    """Fails a test that leaves state of the whole process changed.

    Such a change could affect later tests: torch's results can depend on the number of threads, and compat changes
    the defaults of collections.
    """
    before = torch.get_num_threads(), "rec_sdk_torch.compat" in sys.modules
    yield
    after = torch.get_num_threads(), "rec_sdk_torch.compat" in sys.modules
    assert after == before, "the test left another number of torch's threads, or imported compat"


class WithoutTorchRec(pytest.Module):
    """A test file that is skipped because it needs TorchRec, which is not installed."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip(f"{self.path.name}: torchrec is not installed", allow_module_level=True)


def imports_torchrec(path: Path) -> bool:
    """Returns whether a test file imports TorchRec at its top level, or one of the test helpers that do."""
    names = []
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Import):
            names += [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            names.append(statement.module or "")
    return any(
        name.partition(".")[0] in {"torchrec", "batches", "collection_factory", "training", "option_cases"}
        for name in names
    )


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skips test files that need TorchRec, if it is not installed; tests of operators and the engine still run."""
    if find_spec("torchrec") or not imports_torchrec(module_path):
        return None
    module: pytest.Module = WithoutTorchRec.from_parent(parent, path=module_path)
    return module


def pytest_sessionstart(session: pytest.Session) -> None:
    # pytest_report_header would print nothing under -q.
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    day, operators = session.config.getoption("--day"), session.config.getoption("--operators")
    try:
        if operators == "default":
            default_operators.stand_in(session.config.getoption("--device"))
        device = parse_device(session.config.getoption("--device"))
        torch.empty(0, device=device)
    except (ImportError, RuntimeError, ValueError) as error:
        raise pytest.UsageError(f"--device: {error}") from error
    reporter.write_line(
        f"device: {describe(device)}, operators: {operators}, torch {torch.__version__}, seeds of --day {day}"
    )


def describe(device: torch.device) -> str:
    """Describes the device: the model of a GPU, and whether an NPU is real or emulated."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{device}, {torch.cuda.get_device_name(device)} (sm_{major}{minor})"
    if device.type != "npu":
        return str(device)
    name = torch.npu.get_device_name(device)
    if emulate.active():
        chip = os.environ.get("REC_SDK_EMULATED_SOC", "Ascend910B1")
        return f"{device}, EMULATED, not an NPU: kernels held to the rules of {chip}, torch_npu is told {name}"
    return f"{device}, a real NPU: {name}"


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    return parse_device(request.config.getoption("--device"))
