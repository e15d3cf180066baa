"""setuptools' build backend, which also asks for torch_npu where CANN is: setup.py then builds the kernels for NPUs."""

from __future__ import annotations

import os
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

_ON_NPUS = ["torch-npu==2.13.0"] if os.environ.get("ASCEND_HOME_PATH") else []


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """The packages that `pip install .` puts into its build environment beside pyproject.toml's requirements."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_ON_NPUS]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """The same for `pip install -e .`."""
    return [*build_meta.get_requires_for_build_editable(config_settings), *_ON_NPUS]
