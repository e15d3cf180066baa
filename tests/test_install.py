"""The source distribution builds a wheel, the wheel works, and pip chooses compatible versions."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from rec_sdk_torch import emulate
from rec_sdk_torch.runtime import emulator

ROOT = Path(__file__).resolve().parent.parent
NOT_SOURCE = shutil.ignore_patterns(
    "build", "dist", ".*", "*.so", "*.so.*", "_engine.pyi", "*.egg-info", "__pycache__", "_emulator", "node_modules"
)

TRAIN = """
import pathlib, sys
import torch
import rec_sdk_torch
from rec_sdk_torch import TableBatchedEmbedding, TableConfig, TableOptimizer
assert pathlib.Path(rec_sdk_torch.__file__).is_relative_to(sys.argv[1]), rec_sdk_torch.__file__
embedding = TableBatchedEmbedding(
    [TableConfig("t", 10, 4, init_min=1.0, init_max=1.0)], optimizer=TableOptimizer.create(torch.optim.SGD, {"lr": 0.5})
)
ids, offsets = torch.tensor([3, 3]), torch.tensor([0, 2])
embedding(ids, offsets).sum().backward()
print(embedding.eval()(ids, offsets).tolist())
"""


def run(*command: str | Path, folder: Path, **variables: str) -> str:
    # Outside of any checkout, and without the machine's own CUDA or CMake flags.
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "CMAKE_ARGS"}}
    environment |= {"REC_SDK_CUDA": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    # pip builds in a new folder each time; ccache, where it is installed, still finds the objects.
    environment |= {"CCACHE_BASEDIR": tempfile.gettempdir(), "CCACHE_NOHASHDIR": "1", **variables}
    program = [sys.executable, *map(str, command)]
    done = subprocess.run(
        program, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


MOVE = """
import os, pathlib, runpy, sys
sys.argv = ["setup.py", "--name"]
build = runpy.run_path(sys.argv[0])["Project"].build
build.__globals__["ROOT"] = here = pathlib.Path(os.environ["HERE"])
for folder in "before", "after":
    (here / folder).mkdir()
    (here / folder / "CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.21)\\nproject(p NONE)")
    build.__globals__["Project"]("p", here / folder).build()
"""


def archived(source: Path, folder: Path) -> Path:
    """Makes the source distribution of a folder; returns its archive."""
    run("setup.py", "-q", "sdist", "--dist-dir", folder, folder=source, SOURCE_DATE_EPOCH="1700000000")
    (archive,) = folder.iterdir()
    return archive


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the source distribution from a fresh checkout."""
    source = tmp_path_factory.mktemp("source") / "source"
    shutil.copytree(ROOT, source, ignore=NOT_SOURCE)
    shutil.copy(ROOT / ".clang-format", source)
    return archived(source, tmp_path_factory.mktemp("sdist"))


def test_a_build_goes_on_when_a_project_has_moved(tmp_path: Path) -> None:
    """A project can still be built after its folder was moved, although CMake refuses build trees of other folders."""
    run("-c", MOVE, folder=ROOT, HERE=str(tmp_path))
    (tree,) = (tmp_path / "build").iterdir()
    assert f"CMAKE_HOME_DIRECTORY:INTERNAL={tmp_path / 'after'}" in (tree / "CMakeCache.txt").read_text()


def test_every_package_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = [path.parent.relative_to(ROOT) for path in (ROOT / "rec_sdk_torch").rglob("__init__.py")]
    assert sorted(listed) == sorted(str(folder).replace(os.sep, ".") for folder in found)


def test_the_source_distribution_is_whole(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    rooms = [ROOT / room for room in ("cmake", "emulator", "op_kernels", "torch_npu_ext")]
    sources = [path for room in rooms for path in room.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert len(sources) > 100
    assert not [path for path in sources if str(path.relative_to(ROOT)) not in files]
    assert {"CMakeLists.txt", "Makefile", "requirements-npu.txt", "rec_sdk_torch/__init__.pyi"} <= files
    assert not [name for name in files if name.endswith(".so") or "__pycache__" in name]


def test_a_wheel_of_the_source_distribution_trains(sdist: Path, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    # Compiling for all instruction sets with optimization would take ten times as long.
    quick = "-DREC_SDK_BASELINE_ONLY=ON -DREC_SDK_OPTIMIZE=-O0 '-DCMAKE_CXX_FLAGS_RELEASE=-O0 -DNDEBUG'"
    flags = {} if pytestconfig.getoption("--full") else {"CMAKE_ARGS": quick}
    offline = ("--no-deps", "--no-index", "--quiet")
    run("-m", "pip", "wheel", "--no-build-isolation", *offline, "-w", tmp_path, sdist, folder=tmp_path, **flags)
    (wheel,) = tmp_path.glob("*.whl")
    target = tmp_path / "target"
    run("-m", "pip", "install", *offline, "--target", target, wheel, folder=tmp_path)
    assert (target / "rec_sdk_torch" / "_engine.pyi").exists()
    assert (target / "rec_sdk_torch" / "tbe" / "__init__.pyi").exists()
    code = tmp_path / "train.py"
    code.write_text(TRAIN)
    options = {"PYTHONPATH": str(target), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert run(code, target, folder=tmp_path, **options) == "[[0.0, 0.0, 0.0, 0.0]]\n"


# ---------------------------------------------------------------- the versions that pip chooses

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]


def of_build(name: str) -> Any:
    """Imports a module from the folder cmake/, as setup.py and pip do."""
    sys.path.insert(0, str(ROOT / "cmake"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "cmake"))


CHECKS, ARCHIVE, INDEX = (of_build(name) for name in ("build_checks", "source_archive", "index_page"))
BACKEND = of_build("build_backend")


def requirements(lines: list[str]) -> dict[str, Requirement]:
    return {re.sub("[-_.]+", "-", r.name).lower(): r for r in map(Requirement, lines)}


def pins(file: str) -> dict[str, str]:
    """Returns the pinned versions of a requirements file, by package."""
    lines = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
    return {name: str(r.specifier).removeprefix("==") for name, r in requirements(lines).items()}


def fits(requirement: Requirement, tested: str, *others: str) -> bool:
    """Returns whether a requirement allows the version `tested` and none of `others`."""
    return tested in requirement.specifier and not any(other in requirement.specifier for other in others)


def test_pip_chooses_versions_that_fit() -> None:
    oldest = ".".join(map(str, CHECKS.OLDEST))  # repeated where torch is not installed yet
    assert PROJECT["project"]["requires-python"] == f">={oldest}"
    versions = [each for each in PROJECT["project"]["classifiers"] if "Python :: 3." in each]
    assert versions[0].endswith(oldest)
    tested, pinned = pins("requirements-torch.txt")["torch"], pins("requirements.txt")
    torch = requirements(PROJECT["project"]["dependencies"])["torch"]
    assert fits(torch, tested, "2.10.0", "2.14.0")
    assert fits(torch, "2.11.0")
    extra = requirements(EXTRAS["torchrec"])
    assert str(extra["torchrec"].specifier) == f"=={pinned['torchrec']}"
    # The extra names the CUDA build, requirements.txt the CPU build; each version fits only one version of torch.
    assert str(extra["fbgemm-gpu"].specifier) == f"=={pinned['fbgemm-gpu-cpu']}"
    assert fits(extra["torch"], tested, "2.12.0", "2.14.0")


def test_the_build_requirements_are_those_tested() -> None:
    tested = pins("requirements-build.txt") | pins("requirements-torch.txt")
    build = requirements(BACKEND.REQUIRED)
    assert {*build, "setuptools", "wheel"} == tested.keys()
    for name, requirement in build.items():
        assert str(requirement.specifier) == f"=={tested[name]}"
    assert tested["setuptools"] in requirements(PROJECT["build-system"]["requires"])["setuptools"].specifier
    assert requirements(BACKEND.ON_NPUS)["torch-npu"].specifier == requirements(EXTRAS["npu"])["torch-npu"].specifier


def test_users_get_no_tools_of_developers() -> None:
    """The README's installation names no file with linters and tests. A package in two files has one version."""
    files = {name: pins(f"requirements{name}.txt") for name in ("", "-build", "-dev", "-npu", "-torch", "-wheel")}
    every = {pin for file in files.values() for pin in file.items()}
    assert len(every) == len({package for package, _ in every})
    tools = {"pytest", "ruff", "mypy", "clang-format", "hypothesis", "matplotlib", "scikit-learn"}
    assert tools <= files["-dev"].keys()
    assert not files["-dev"].keys() & (files[""].keys() | files["-build"].keys())
    readme = (ROOT / "README.md").read_text()
    assert "-r requirements.txt -r requirements-build.txt" in readme
    assert "requirements-dev" not in readme
    assert set(requirements(PROJECT["project"]["dependencies"])) == {"torch", "numpy"}


def test_extras() -> None:
    assert EXTRAS.keys() == {"torchrec", "npu", "plot", "dev"}
    npu = requirements(EXTRAS["npu"])
    assert npu["torch-npu"].specifier.contains(pins("requirements-npu.txt")["torch-npu"])
    assert pins("requirements-torch.txt")["torch"] in npu["torch"].specifier
    dev = requirements(EXTRAS["dev"])
    for file in ("requirements.txt", "requirements-build.txt", "requirements-dev.txt"):
        assert all(version in dev[name].specifier for name, version in pins(file).items() if name in dev)


# ---------------------------------------------------------------- checks before a build


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sets PATH to a single empty folder."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path


def test_no_compiler(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sentence,) = CHECKS.missing(packages=True)
    assert "no C++ compiler is on the path (c++, g++, clang++), and CXX is not set" in sentence
    monkeypatch.setenv("CXX", "/no/such/g++ -m64")
    assert CHECKS.missing(packages=True) == ["CXX is '/no/such/g++ -m64', and there is no such program"]
    (empty / "g++").touch(mode=0o755)
    monkeypatch.delenv("CXX")
    assert CHECKS.missing(packages=True) == []


def test_no_headers_and_no_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert CHECKS.missing(packages=True) == [], "nothing is missing here"
    monkeypatch.setattr(CHECKS.sysconfig, "get_path", lambda name: str(tmp_path))
    (sentence,) = CHECKS.missing(packages=False)
    assert f"there is no {tmp_path}/Python.h; on Debian: apt-get install python3-dev" in sentence
    monkeypatch.setattr(CHECKS, "find_spec", lambda name: None)
    _, sentence = CHECKS.missing(packages=True)
    assert "lacks cmake, ninja, pybind11, torch: pip install -r requirements-torch.txt" in sentence


def test_sources_without_a_build(tmp_path: Path) -> None:
    """Python started in the repository imports its sources even if the package is installed elsewhere."""
    source = ROOT / "rec_sdk_torch"
    shutil.copytree(source, tmp_path / source.name, ignore=shutil.ignore_patterns("*.so", "__pycache__", "_emulator"))
    command = [sys.executable, "-c", "from rec_sdk_torch.tbe import TableConfig"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: the host engine of rec_sdk_torch is not built in {tmp_path / source.name}, ")
    assert "make build" in last


def test_only_the_old_python_is_reported(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CHECKS, "OLDEST", (9, 0))
    (sentence,) = CHECKS.missing(packages=True)
    own = ".".join(map(str, sys.version_info[:2]))
    assert sentence == f"it needs Python 9.0 or later, and {sys.executable} is Python {own}"
    with pytest.raises(SystemExit, match=r"^rec_sdk_torch cannot be built: it needs Python 9\.0 or later.*\.$"):
        BACKEND.get_requires_for_build_wheel()


def test_setup_reports_in_one_line(empty: Path) -> None:
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", str(empty)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: rec_sdk_torch cannot be built: no C++ compiler is on the path")


# ---------------------------------------------------------------- the page on a package index


def test_links_of_the_index_page_lead_somewhere() -> None:
    page = INDEX.description((ROOT / "README.md").read_text())
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    shown = INDEX.description("[Saves](docs/checkpoint.md#files), [LICENSE](LICENSE)")
    assert shown == "Saves (docs/checkpoint.md), LICENSE"


def test_metadata(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        (name,) = [name for name in archive.getnames() if name.count("/") == 1 and name.endswith("/PKG-INFO")]
        file = archive.extractfile(name)
        assert file is not None
        text = file.read().decode()
    head, _, description = text.partition("\n\n")
    assert set(head.splitlines()) >= {
        "Author: rec_sdk_torch contributors",
        "License-Expression: Apache-2.0",
        "Requires-Python: >=3.11",
        "Description-Content-Type: text/markdown",
        "Provides-Extra: npu",
        "License-File: LICENSE",
    }
    assert "Project-URL" not in head
    assert description.strip() == INDEX.description((ROOT / "README.md").read_text()).strip()


def test_two_archives_are_the_same_bytes(tmp_path: Path) -> None:
    """Two archives, made in different folders at different times from files of different ages, have the same bytes."""
    made = []
    for number, age in enumerate((0, 10**6)):
        folder = tmp_path / str(number) / "rec_sdk_torch-1"
        (folder / "inner").mkdir(parents=True)
        for name, contents in (("b.py", "b"), ("inner/a.py", "a")):
            (folder / name).write_text(contents)
            os.utime(folder / name, (age, age))
        ARCHIVE.write(folder, tmp_path / f"{number}.tar.gz", 1_700_000_000)
        made.append((tmp_path / f"{number}.tar.gz").read_bytes())
    assert made[0] == made[1]
    with tarfile.open(tmp_path / "0.tar.gz") as archive:
        entries = archive.getmembers()
    assert [entry.name for entry in entries] == ["rec_sdk_torch-1/b.py", "rec_sdk_torch-1/inner/a.py"]
    assert {(entry.mtime, entry.uid, entry.uname, entry.mode) for entry in entries} == {(1_700_000_000, 0, "", 0o644)}


def test_a_source_distribution_can_build_another(sdist: Path, tmp_path: Path) -> None:
    """An unpacked source distribution can build the same source distribution again."""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    first, second = (archived(source, tmp_path / name).read_bytes() for name in "ab")
    assert first == second


# ---------------------------------------------------------------- the emulated NPU, in an environment without it

SET_UP = f"make -C {ROOT} build-npu && {ROOT}/.venv-npu/bin/python -m rec_sdk_torch.emulate program.py"


@pytest.fixture
def without_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulator, "_has_torch_npu", lambda: False)


def refusal(capsys: pytest.CaptureFixture[str]) -> str:
    assert emulate.main(["--lib"]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.usefixtures("without_torch_npu")
def test_the_launcher_says_how_to_get_the_emulated_npu(capsys: pytest.CaptureFixture[str]) -> None:
    """The hint does not suggest `pip install torch_npu`, which would make `import torch` fail in this environment."""
    line = refusal(capsys)
    assert f"torch_npu is not installed for {sys.executable}" in line
    assert line.rstrip().endswith(SET_UP)
    assert "pip install" not in line
    assert emulate.hint() == f"Without an NPU, run the program on the emulated NPU: {SET_UP}"


@pytest.mark.usefixtures("without_torch_npu")
def test_the_hint_outside_of_a_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(emulator, "_ROOT", tmp_path)
    command = ".venv-npu/bin/python -m rec_sdk_torch.emulate program.py"
    assert emulate.hint().endswith(f"make build-npu && {command}, in the repository of rec_sdk_torch")


@pytest.mark.parametrize("missing", ["_emulator/libascendcl.so", "_ops_npu.so"])
def test_a_hint_never_leads_back_to_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, missing: str
) -> None:
    """With torch_npu and an incomplete build, the launcher refuses to start, so the hint names the build."""
    package = tmp_path / "rec_sdk_torch"
    for name in {"_emulator/libascendcl.so", "_ops_npu.so", "runtime/emulator.py"} - {missing}:
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    monkeypatch.setattr(emulator, "__file__", str(package / "runtime" / "emulator.py"))
    monkeypatch.setattr(emulator, "_has_torch_npu", lambda: True)
    line = refusal(capsys)
    assert f"{package / missing} is missing" in line
    assert line.rstrip().endswith(SET_UP)
    assert emulate.hint().endswith(SET_UP)
    (package / missing).parent.mkdir(exist_ok=True)
    (package / missing).touch()
    assert emulate.hint().endswith(f"{sys.executable} -m rec_sdk_torch.emulate program.py")
    assert emulate.check(force=True) == package / "_emulator"


def test_the_command_of_the_hint_exists() -> None:
    """A dry run of make shows that it creates the Python environment that the hint then uses."""
    command, _, launch = SET_UP.partition(" && ")
    planned = subprocess.run([*command.split(), "-n", "-B"], capture_output=True, text=True, check=False)
    assert planned.returncode == 0, planned.stderr
    python = Path(launch.split()[0]).relative_to(ROOT)
    assert f"-m venv --without-pip {python.parents[1]}" in planned.stdout
    assert f"{python} -m pip install --quiet --no-deps -r requirements-npu.txt" in planned.stdout
    assert f"{python} setup.py --quiet build_ext --inplace --projects npu,ascendc,emulator" in planned.stdout


def test_users_pages_have_the_command() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for text in (shown, (ROOT / "README.md").read_text(), (ROOT / "docs" / "emulator.md").read_text()):
        assert "make build-npu" in text
        assert ".venv-npu/bin/python -m rec_sdk_torch.emulate" in text
