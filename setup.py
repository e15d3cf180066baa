"""Builds the host engine and the operators with CMake; everything else is in pyproject.toml."""

import os
import subprocess
import sys
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    """Builds every extension in one CMake tree, kept between builds so that rebuilding is incremental."""

    def run(self) -> None:
        # An editable install and `build_ext --inplace` want the libraries beside the Python files.
        in_place = bool(self.inplace) or getattr(self, "editable_mode", False)
        package = ROOT / "rec_sdk_torch" if in_place else Path(self.build_lib).resolve() / "rec_sdk_torch"
        build = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
        build.mkdir(parents=True, exist_ok=True)
        package.mkdir(parents=True, exist_ok=True)
        configure = [
            "cmake",
            "-S",
            str(ROOT),
            "-B",
            str(build),
            "-G",
            "Ninja",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={package}",
        ]
        # The programs of this environment (cmake, ninja) come first, whether or not it is activated.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        environment = {**os.environ, "PATH": path}
        subprocess.run(configure, check=True, env=environment)
        subprocess.run(["cmake", "--build", str(build)], check=True, env=environment)


setup(
    ext_modules=[Extension("rec_sdk_torch._engine", []), Extension("rec_sdk_torch._ops", [])],
    cmdclass={"build_ext": CMakeBuild},
)
