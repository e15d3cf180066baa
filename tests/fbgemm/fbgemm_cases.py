"""Random modules and batches, and a float64 reference for FBGEMM's module in plain torch."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from reference_optimizers import (
    Adam,
    BoundedRowWiseAdagrad,
    GloballyDecayedRowWiseAdagrad,
    Lamb,
    LarsSgd,
    PartialRowWiseAdam,
    PartialRowWiseLamb,
    RowWiseAdagrad,
    on_rows_by,
)

from rec_sdk_torch.fbgemm import (
    EnsembleModeDefinition,
    GlobalWeightDecayDefinition,
    SplitTableBatchedEmbeddingBagsCodegen,
)

BAGS, LONGEST, STEPS = 4, 2, 6

LR = 0.05


@dataclass
class Case:
    """The tables and features of a module, with a generator for its batches."""

    seed: int
    pooling: str
    weighted: bool
    dims: list[int]
    rows: list[int]
    feature_table_map: list[int]
    index_dtype: torch.dtype
    offset_dtype: torch.dtype
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    @property
    def feature_dims(self) -> list[int]:
        return [self.dims[table] for table in self.feature_table_map]

    def batch(self, bags: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Draws ids with duplicates, offsets and per-sample weights; `bags` is the number of bags per feature."""
        bags = [BAGS] * len(self.feature_table_map) if bags is None else bags
        lengths = torch.randint(LONGEST + 1, (sum(bags),), generator=self.generator)
        per_bag = [
            self.rows[table] for table, size in zip(self.feature_table_map, bags, strict=True) for _ in range(size)
        ]
        bounds = torch.tensor(per_bag, dtype=torch.int64).repeat_interleave(lengths)
        draws = torch.rand(len(bounds), generator=self.generator) ** 2
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        weights = torch.rand(len(bounds), generator=self.generator) - 0.3 if self.weighted else None
        return (draws * bounds).to(self.index_dtype), offsets.to(self.offset_dtype), weights

    def weights(self) -> list[torch.Tensor]:
        pairs = zip(self.rows, self.dims, strict=True)
        return [torch.rand(shape, generator=self.generator) - 0.5 for shape in pairs]


def random_case(seed: int, for_fbgemm: bool = False) -> Case:
    """Draws several tables with mixed dims, shared tables, and features in any order.

    For FBGEMM's CPU module, dims are multiples of 4 and features are in the order of tables, as it requires.
    """
    draw = random.Random(seed)
    count = draw.randint(1, 4)
    pooling = draw.choice(["SUM", "SUM", "MEAN", "NONE"])
    dims = [(4 if for_fbgemm else 1) * draw.randint(1, 6) for _ in range(count)]
    if pooling == "NONE":
        dims = [dims[0]] * count
    features = list(range(count)) + [draw.randrange(count) for _ in range(draw.randint(0, 2))]
    draw.choice([features.sort, lambda: draw.shuffle(features)])()
    if for_fbgemm:
        features.sort()
    types = [torch.int32, torch.int64]
    return Case(
        seed,
        pooling,
        pooling == "SUM" and draw.random() < 0.6,
        dims,
        [draw.randint(64, 90) for _ in range(count)],
        features,
        draw.choice(types),
        draw.choice(types),
    )


def make_ours(case: Case, device: torch.device, location: str = "resident", **options: Any) -> Any:
    """Builds this package's module on `device`; `location` is a name of FBGEMM's, or "resident" for device memory."""
    on_cpu = device.type == "cpu"
    place = ("HOST" if on_cpu else "DEVICE") if location == "resident" else location
    specs = [(rows, dim, place, "CPU" if on_cpu else "CUDA") for rows, dim in zip(case.rows, case.dims, strict=True)]
    return SplitTableBatchedEmbeddingBagsCodegen(
        specs,
        feature_table_map=case.feature_table_map,
        pooling_mode=case.pooling,
        device=device,
        **{"cache_load_factor": 0.5, "learning_rate": LR, **options},
    )


def set_weights(module: Any, weights: list[torch.Tensor]) -> None:
    """Sets the weights: of resident tables in place, of other tables through the table interface."""
    for table, values in zip(module.tables.tables, weights, strict=True):
        module.tables.view(table.name).write(torch.arange(len(values)), {"weight": values.to(table.weight_dtype)})


LOCATION = pytest.mark.parametrize("location", ["resident", "MANAGED_CACHING"])


def training() -> Any:
    """Imports FBGEMM's training module; skips the test if it is not installed."""
    return pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")


def make_fbgemms(case: Case, **options: Any) -> Any:
    """Builds FBGEMM's module on the CPU; enum options may be given by name."""
    kinds = training()
    options = {"pooling_mode": case.pooling, "learning_rate": LR, **options}
    enums = {
        "optimizer": kinds.OptimType,
        "pooling_mode": kinds.PoolingMode,
        "weight_decay_mode": kinds.WeightDecayMode,
        "bounds_check_mode": kinds.BoundsCheckMode,
    }
    named = {name: enums[name][value] for name, value in options.items() if name in enums}
    place = kinds.EmbeddingLocation.HOST, kinds.ComputeDevice.CPU
    return kinds.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, *place) for rows, dim in zip(case.rows, case.dims, strict=True)],
        feature_table_map=case.feature_table_map,
        device=torch.device("cpu"),
        **{**options, **named},
    )


def make_both(case: Case, device: torch.device, location: str = "resident", **options: Any) -> tuple[Any, Any]:
    """Builds FBGEMM's module and this package's, with the same weights."""
    theirs, ours = make_fbgemms(case, **options), make_ours(case, device, location, **options)
    initial = case.weights()
    for weight, values in zip(theirs.split_embedding_weights(), initial, strict=True):
        weight.copy_(values)
    set_weights(ours, initial)
    return theirs, ours


def step_both(theirs: Any, ours: Any, case: Case, bags: list[int] | None = None, **options: Any) -> None:
    """Trains both modules on a random batch; compares outputs and gradients of per-sample weights."""
    indices, offsets, weights = case.batch(bags)
    our_weights, their_weights = (None if weights is None else weights.clone().requires_grad_() for _ in "ab")
    # FBGEMM's kernels read ids and offsets of one type, and its module casts the latter only.
    # outputs may be changed in place, since the caller owns them
    expected = theirs(indices.long(), offsets.long(), their_weights, **options).mul_(0.5)
    found = ours(indices, offsets, our_weights, **options).mul_(0.5)
    torch.testing.assert_close(found.detach().cpu(), expected.detach().view(found.shape))
    grad = torch.randn(expected.shape, generator=case.generator)
    expected.backward(grad)
    found.backward(grad.view(found.shape).to(found.device))
    if our_weights is not None:
        torch.testing.assert_close(our_weights.grad, their_weights.grad)


def weights_of(module: Any) -> list[torch.Tensor]:
    """Returns the weights of each table, on the host."""
    return [weight.detach().cpu() for weight in module.split_embedding_weights()]


def states_of(module: Any) -> list[list[torch.Tensor]]:
    """Returns the states of each table, on the host."""
    return [[state.cpu() for state in of_table] for of_table in module.split_optimizer_states()]


def assert_same(one: Any, other: Any) -> None:
    """Checks that two lists of tensors are bit-identical."""
    torch.testing.assert_close(one, other, rtol=0, atol=0)


ENSEMBLE = EnsembleModeDefinition(step_ema=2, step_swap=1000)
EPS: dict[str, Any] = {"eps": 1e-3}
DECAY = EPS | {"weight_decay": 0.1}
LARS = {"eta": 0.1, "momentum": 0.8, "weight_decay": 0.1}
BETAS: tuple[dict[str, Any], dict[str, Any]] = (
    {"betas": (0.8, 0.95), "eps": 1e-2},
    {"beta1": 0.8, "beta2": 0.95, "eps": 1e-2},
)
DECAYED = [options | {"weight_decay": 0.1} for options in BETAS]
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], dict[str, Any]]] = {
    "EXACT_SGD": (torch.optim.SGD, {}, {}),
    "EXACT_ADAGRAD": (torch.optim.Adagrad, EPS, EPS),
    "ADAM": (Adam, *BETAS),
    "ADAM decay": (on_rows_by(torch.optim.AdamW, Adam.states), *DECAYED),
    "LAMB": (Lamb, *DECAYED),
    "PARTIAL_ROWWISE_ADAM": (PartialRowWiseAdam, *DECAYED),
    "PARTIAL_ROWWISE_LAMB": (PartialRowWiseLamb, *DECAYED),
    "LARS_SGD": (LarsSgd, LARS, LARS),
    "EXACT_ROWWISE_ADAGRAD": (RowWiseAdagrad, EPS, EPS),
    "ENSEMBLE_ROWWISE_ADAGRAD": (
        BoundedRowWiseAdagrad,
        DECAY | {"max_norm": 0.6},
        DECAY | {"max_norm": 0.6, "weight_decay_mode": "L2", "ensemble_mode": ENSEMBLE},
    ),
    "EXACT_ROWWISE_ADAGRAD L2": (
        RowWiseAdagrad,
        DECAY | {"weight_decay_mode": "l2"},
        DECAY | {"weight_decay_mode": "L2"},
    ),
    "EXACT_ROWWISE_ADAGRAD DECOUPLE": (
        RowWiseAdagrad,
        DECAY | {"weight_decay_mode": "decouple"},
        DECAY | {"weight_decay_mode": "DECOUPLE"},
    ),
    "EXACT_ROWWISE_ADAGRAD max_norm": (BoundedRowWiseAdagrad, EPS | {"max_norm": 0.6}, EPS | {"max_norm": 0.6}),
    "EXACT_ROWWISE_ADAGRAD DECOUPLE_GLOBAL": (
        GloballyDecayedRowWiseAdagrad,
        DECAY | {"gwd_start_iter": 2, "gwd_lower_bound": 0.5},
        DECAY | {"weight_decay_mode": "DECOUPLE_GLOBAL", "global_weight_decay": GlobalWeightDecayDefinition(2, 0.5)},
    ),
}
"""The class and keywords of the reference, and FBGEMM's arguments, by FBGEMM's name of the optimizer and its mode."""


class Reference:
    """Dense float64 tables with one lookup per feature; optimizers see the rows that the batch touched."""

    def __init__(self, case: Case, weights: list[torch.Tensor], optimizer: type, options: Mapping[str, Any]) -> None:
        self.case = case
        self.weights = [torch.nn.Parameter(values.double().clone()) for values in weights]
        self.optimizers = [optimizer([weight], lr=LR, **options) for weight in self.weights]

    def __call__(
        self, indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        outputs = []
        for feature, table in enumerate(self.case.feature_table_map):
            own = offsets[feature * BAGS : (feature + 1) * BAGS + 1].long()
            ids = indices[int(own[0]) : int(own[-1])].long()
            rows = torch.nn.functional.embedding(ids, self.weights[table], sparse=True)
            if self.case.pooling != "NONE":
                if weights is not None:
                    rows = rows * weights[int(own[0]) : int(own[-1]), None].double()
                lengths = own.diff()
                bag = torch.arange(BAGS).repeat_interleave(lengths)
                rows = rows.new_zeros((BAGS, rows.shape[1])).index_add(0, bag, rows)
                if self.case.pooling == "MEAN":
                    rows = rows / lengths.clamp(min=1)[:, None]
            outputs.append(rows)
        return torch.cat(outputs, dim=0 if self.case.pooling == "NONE" else 1)

    def step(self) -> None:
        for optimizer, weight in zip(self.optimizers, self.weights, strict=True):
            grad = weight.grad
            assert grad is not None
            weight.grad = grad.coalesce()
            optimizer.step()
            weight.grad = None
