"""Builds the C++ code with CMake; all other settings are in pyproject.toml.

The engine with the CPU operators is always built. The CUDA operators are built if nvcc and a torch for the same CUDA
are installed. The NPU operators and their kernels are built if torch_npu is installed: with CANN's compiler if
ASCEND_HOME_PATH names CANN, otherwise for the emulated NPU.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import SetupError

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "cmake"))

import build_checks  # noqa: E402  # importable only after cmake/ was added to sys.path
import index_page  # noqa: E402  # importable only after cmake/ was added to sys.path
from source_archive import SourceArchive  # noqa: E402  # importable only after cmake/ was added to sys.path


def _source_of(tree: Path) -> Path | None:
    """Returns the source folder that the build tree was configured for, or None if it is not configured yet."""
    cache = tree / "CMakeCache.txt"
    source = (
        re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.*)$", cache.read_text(), re.MULTILINE) if cache.exists() else None
    )
    return None if source is None else Path(source[1])


@dataclass(frozen=True)
class Project:
    """A CMake project of this repository."""

    name: str
    source: Path
    options: dict[str, str | Path] = field(default_factory=dict)

    def build(self) -> None:
        """Builds the project in a tree that is kept between builds, so that a build is incremental."""
        import cmake
        import ninja

        tree = ROOT / "build" / f"{self.name}-{sys.implementation.cache_tag}"
        # Programs installed by the build requirements are found even if their environment is not activated.
        path = os.pathsep.join([cmake.CMAKE_BIN_DIR, ninja.BIN_DIR, os.environ.get("PATH", "")])
        environment = {**os.environ, "PATH": path}
        options = [f"-D{name}={value}" for name, value in self.options.items()]
        if shutil.which("ccache"):
            options += [f"-DCMAKE_{language}_COMPILER_LAUNCHER=ccache" for language in ("C", "CXX", "CUDA")]
        options += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        if _source_of(tree) not in (None, self.source):  # the project's folder was moved after the tree was configured
            options.append("--fresh")
        configure = ["cmake", "-S", str(self.source), "-B", str(tree), "-G", "Ninja", *options]
        subprocess.run(configure, check=True, env=environment)
        subprocess.run(["cmake", "--build", str(tree)], check=True, env=environment)


def find_nvcc() -> str | None:
    """Returns the path of CUDA's compiler: in CUDA_HOME, else on PATH, else in CUDA's default folder."""
    folders = [os.environ.get("CUDA_HOME", "") + "/bin", os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def without_cuda() -> str:
    """Returns why the operators are not built for CUDA here; an empty string if they are."""
    if os.environ.get("REC_SDK_CUDA") == "0":
        return "REC_SDK_CUDA=0 is set"
    nvcc = find_nvcc()
    if nvcc is None:
        return "there is no nvcc, in CUDA_HOME, on the path or in /usr/local/cuda"
    torch = find_spec("torch")  # torch is not imported, which takes seconds, and which torch_npu may forbid
    if torch is None or torch.origin is None:
        return "torch is not installed"
    # torch's CUDA version, such as "13.0"; None in builds without CUDA.
    of_torch = runpy.run_path(str(Path(torch.origin).with_name("version.py"))).get("cuda")
    if of_torch is None:
        return "the installed torch is a build without CUDA"
    report = subprocess.run([nvcc, "--version"], check=False, capture_output=True, text=True).stdout
    release = re.search(r"release (\d+)\.(\d+)", report)
    if release is None:
        return f"{nvcc} --version does not name its release"
    major, minor = (int(number) for number in of_torch.split(".")[:2])
    # The kernels use torch's CUDA runtime, which supports its own release and older ones of the same major version.
    if int(release[1]) != major or int(release[2]) > minor:
        return f"torch is built for CUDA {of_torch}, and {nvcc} is of CUDA {release[1]}.{release[2]}"
    return ""


def projects(package: Path) -> Iterator[Project]:
    """Yields the projects that this environment can build; their libraries are written to `package`."""
    import pybind11

    python = {"Python_EXECUTABLE": sys.executable}
    engine = {"pybind11_DIR": pybind11.get_cmake_dir(), "CMAKE_LIBRARY_OUTPUT_DIRECTORY": package}
    yield Project("engine", ROOT, {**python, **engine})
    operators = {**python, "REC_SDK_PACKAGE": package}
    if not without_cuda():
        options = {"CMAKE_CUDA_COMPILER": str(find_nvcc())}
        yield Project("cuda", ROOT / "torch_npu_ext" / "cuda", {**operators, **options})
    if find_spec("torch_npu") is None:
        return
    yield Project("npu", ROOT / "torch_npu_ext" / "npu", operators)
    if os.environ.get("ASCEND_HOME_PATH"):
        yield Project("ascendc", ROOT / "op_kernels" / "ascendc", {"REC_SDK_ASCENDC_OUTPUT": package})
    else:
        output = {"REC_SDK_EMULATOR_OUTPUT": package / "_emulator"}
        yield Project("emulator", ROOT / "emulator", {**python, **output})


class CMakeBuild(build_ext):
    """The build command: builds every project, or only the projects named by `--projects`."""

    user_options: ClassVar = [*build_ext.user_options, ("projects=", None, "engine,cuda,npu,ascendc,emulator")]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.projects = ""

    def run(self) -> None:
        problems = build_checks.missing(packages=True)
        if problems:
            raise SetupError("rec_sdk_torch cannot be built: " + ". ".join(problems))
        # An editable install and `build_ext --inplace` need the libraries next to the Python files.
        in_place = bool(self.inplace) or getattr(self, "editable_mode", False)
        package = ROOT / "rec_sdk_torch" if in_place else Path(self.build_lib).resolve() / "rec_sdk_torch"
        package.mkdir(parents=True, exist_ok=True)
        wanted = set(filter(None, self.projects.split(",")))
        if "cuda" in wanted and without_cuda():
            raise SetupError(f"--projects cuda: {without_cuda()}")
        for project in projects(package):
            if not wanted or project.name in wanted:
                project.build()


setup(
    ext_modules=[Extension("rec_sdk_torch._engine", []), Extension("rec_sdk_torch._ops", [])],
    cmdclass={"build_ext": CMakeBuild, "sdist": SourceArchive},
    long_description=index_page.description((ROOT / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
