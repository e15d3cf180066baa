"""Pytest plugin that replaces the CPU's operators by CUDA's dispatch and kernels, run on the host."""

from __future__ import annotations

import ctypes
import os
import warnings

import pytest
import torch

from rec_sdk_torch import ops

LIBRARY = os.environ["CUDA_OPERATORS_LIBRARY"]


def pytest_configure(config: pytest.Config) -> None:
    assert ops.ops is torch.ops.rec_sdk, "the operators of the CPU come first"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # overriding a registered kernel warns
        torch.ops.load_library(LIBRARY)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "contents" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="CUDA does not look at the contents of index tensors"))


def pytest_unconfigure() -> None:
    print(f"CUDA operators launched on the host: {ctypes.CDLL(LIBRARY).cuda_operators_launches()}")
