"""Replaces kernels by the default operators, which are written in plain torch: conftest.py's `--operators default`.

The operator tests then run as they would on a device that has no kernel yet.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings

import torch

from rec_sdk_torch.operators import calls
from rec_sdk_torch.operators.default import KERNELS
from rec_sdk_torch.operators.devices import backends, npu

_kept: list[torch.library.Library] = []


def stand_in(device: str) -> None:
    """Makes devices of this type use the default operators.

    The CPU's kernels are registered already and are overridden; kernels of other devices are kept from being loaded.
    """
    kind = device.partition(":")[0]
    if kind != "cpu":
        load = npu._import_torch_npu if kind == "npu" else backends._nothing
        backends._BACKENDS[kind] = dataclasses.replace(backends._BACKENDS[kind], load=load)
        return
    library = torch.library.Library("rec_sdk", "IMPL", "CPU")
    _kept.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns when a registered kernel is overridden
        for name in KERNELS:
            library.impl(name, functools.partial(calls._load_and_call, name))
