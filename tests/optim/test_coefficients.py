"""Coefficients of the fused update: each spec has the coefficients of its kernel and a row in optimizer_table.py."""

from __future__ import annotations

import enum
import pkgutil
from typing import Any

import numpy as np
import pytest
import torch
import torchrec
from batches import single_ids
from collection_factory import apply, bags_collection, index_bag_config
from optimizer_table import ROWS
from training import train_step

from rec_sdk_torch.formulas import SPECS, UPDATES, OptimizerSpec, spec_for
from rec_sdk_torch.operators.schemas import coefficient_names
from rec_sdk_torch.tbe import TableOptimizer


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.classes[0].rpartition('.')[2]}-{spec.kernel}")
def test_a_spec_has_the_coefficients_that_its_kernel_names(spec: OptimizerSpec) -> None:
    assert sorted(spec.coefficients(spec.options, 1)) == sorted(coefficient_names(spec.kernel))


def test_every_optimizer_has_a_row_in_the_table_of_tests() -> None:
    found = {(row.spec.classes[0], row.spec.kernel) for row in ROWS}
    missing = {(spec.classes[0], spec.kernel) for spec in UPDATES if not spec.collects_gradients} - found
    assert not missing, f"tests/optimizer_table.py has no row of {missing}"


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.classes[0].rpartition('.')[2]}-{spec.kernel}")
def test_an_example_selects_its_spec(spec: OptimizerSpec) -> None:
    assert spec_for(pkgutil.resolve_name(spec.classes[0]), spec.example) is spec


def test_a_window_updates_like_an_optimizer_without_window() -> None:
    updates = {(spec.kernel, spec.coefficients) for spec in UPDATES}
    assert {(spec.kernel, spec.coefficients) for spec in SPECS if spec.accumulates} <= updates


def test_an_unknown_kernel_has_no_coefficients() -> None:
    with pytest.raises(ValueError, match="no optimizer 'no_such'"):
        coefficient_names("no_such")


@pytest.mark.parametrize("cls", [torch.optim.Adagrad, torch.optim.SparseAdam, torch.optim.AdamW, torchrec.optim.LAMB])
@pytest.mark.parametrize("kind", [lambda value: torch.tensor(value, dtype=torch.float64), torch.tensor, np.float32])
def test_options_of_any_library_are_computed_with_in_double_precision(cls: type, kind: Any) -> None:
    """Options of other libraries' types become Python numbers, as in saves, so resumed training is bit-identical."""
    numbers = {name: value for name, value in spec_for(cls).options.items() if isinstance(value, float)}
    given = {name: kind(value) for name, value in numbers.items()}
    if "betas" in spec_for(cls).options:
        given["betas"] = (kind(0.9), kind(0.999))
    optimizer = TableOptimizer.create(cls, given)
    plain = {name: tuple(map(float, value)) if name == "betas" else float(value) for name, value in given.items()}
    again = TableOptimizer.create(cls, plain)
    for step in range(4):
        optimizer.step = again.step = step
        assert list(map(float, optimizer.coefficients())) == again.coefficients()


class Mode(enum.IntEnum):  # an enum like FBGEMM's WeightDecayMode
    DECOUPLE = 2


@pytest.mark.parametrize("mode", ["decouple", "DECOUPLE", Mode.DECOUPLE])
def test_decay_that_is_decoupled(mode: Any) -> None:
    optimizer = TableOptimizer.create(
        torchrec.optim.RowWiseAdagrad, {"lr": 0.5, "weight_decay": 0.25, "weight_decay_mode": mode}
    )
    columns = dict(zip(coefficient_names(optimizer.spec.kernel), optimizer.coefficients()[1:], strict=False))
    assert (columns["l2"], columns["decoupled"]) == (0.0, 0.125)


@pytest.mark.parametrize("cls", [torchrec.optim.LAMB, torchrec.optim.PartialRowWiseLAMB, torchrec.optim.LarsSGD])
def test_a_row_of_zeros_stays_without_being_nan(device: torch.device, cls: type) -> None:
    """The norm of a row of zeros is 0, and so is the norm of its step; their ratio must not be NaN."""
    config = index_bag_config(num_embeddings=3, weight_init_min=0.0, weight_init_max=0.0)
    collection = apply(bags_collection(device, config), cls)
    for ids, factor in (([1, 2], 1.0), ([1], 0.0)):
        train_step(collection, single_ids(ids), factor)
    assert not collection.state_dict()["embedding_bags.t0.weight"].any()
