"""A wrapper of setuptools' build backend: checks the build tools, then lists the packages that a build needs.

The packages are not listed in pyproject.toml, because pip would then download torch, which is large, before the
check. If CANN is installed, torch_npu is one of the packages, and setup.py builds the kernels for NPUs.
"""

from __future__ import annotations

import os
import sys

import build_checks
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

REQUIRED = ["pybind11==3.1.0", "cmake==4.4.4", "ninja==1.13.2", "torch==2.13.0"]
ON_NPUS = ["torch-npu==2.13.0"]


def _required():
    problems = build_checks.missing(packages=False)
    if problems:
        sys.exit("rec_sdk_torch cannot be built: " + ". ".join(problems) + ".")
    return [*REQUIRED, *(ON_NPUS if os.environ.get("ASCEND_HOME_PATH") else [])]


def get_requires_for_build_wheel(config_settings=None):
    """Returns the packages that `pip install .` needs in its build environment beyond pyproject.toml's requirements."""
    return [*_required(), *build_meta.get_requires_for_build_wheel(config_settings)]


def get_requires_for_build_editable(config_settings=None):
    """Returns the same packages for `pip install -e .`."""
    return [*_required(), *build_meta.get_requires_for_build_editable(config_settings)]
