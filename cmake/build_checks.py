"""Checks for everything that a build needs before anything is downloaded or compiled; reports what is missing."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
from importlib.util import find_spec

OLDEST = (3, 11)
"""The oldest Python; as `requires-python` in pyproject.toml."""
COMPILERS = ("c++", "g++", "clang++")
PACKAGES = ("cmake", "ninja", "pybind11", "torch")


def _python():
    if sys.version_info >= OLDEST:
        return ""
    wanted, found = (".".join(map(str, version[:2])) for version in (OLDEST, sys.version_info))
    return f"it needs Python {wanted} or later, and {sys.executable} is Python {found}"


def _compiler():
    given = os.environ.get("CXX")
    if given:
        if shutil.which(shlex.split(given)[0]):
            return ""
        return f"CXX is {given!r}, and there is no such program"
    if any(shutil.which(name) for name in COMPILERS):
        return ""
    wanted = ", ".join(COMPILERS)
    return f"no C++ compiler is on the path ({wanted}), and CXX is not set; on Debian: apt-get install g++"


def _headers():
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    if os.path.exists(header):
        return ""
    return f"Python's headers are missing, there is no {header}; on Debian: apt-get install python3-dev"


def _packages():
    given = "REC_SDK_TORCH=" in os.environ.get("CMAKE_ARGS", "")  # torch is in another environment
    specs = {name: find_spec(name) for name in PACKAGES if not (name == "torch" and given)}
    # This folder is also named cmake: find_spec finds it, although it is not the package.
    missing = [name for name, spec in specs.items() if spec is None or spec.origin is None]
    if not missing:
        return ""
    names = ", ".join(missing)
    return f"{sys.executable} lacks {names}: pip install -r requirements-torch.txt -r requirements-build.txt"


def missing(packages):
    """Returns one sentence per missing build requirement, the most basic first; an empty list if a build can start.

    packages: whether the Python packages must be installed already; if not, pip will install them.
    """
    python = _python()
    if python:
        return [python]
    looked = [_compiler(), _headers(), _packages() if packages else ""]
    return [sentence for sentence in looked if sentence]
