"""Stochastic rounding of whole tables: results do not depend on the layout of rows, and small updates add up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from embeddings import embedding_of, ids_of, one_table, weights_of
from reference_rounding import random_bits, rounded, row_numbers

from rec_sdk_torch.tbe import Pooling, TableConfig
from rec_sdk_torch.tbe.cache.update_arguments import rounding_seeds

DTYPES = [torch.bfloat16, torch.float16]
DIM, STEPS, BAGS, LOOKUPS = 20, 12, 8, 3
SEED = 5
SGD = torch.optim.SGD, {"lr": 0.01}


def tables() -> list[TableConfig]:
    common: dict[str, Any] = {"weight_dtype": torch.bfloat16, "stochastic_rounding": True}
    return [
        TableConfig("hashed", 100, DIM, **common),
        TableConfig("indexed", 60, DIM, num_features=2, hashed=False, **common),
    ]


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    offsets = torch.arange(0, 3 * BAGS * LOOKUPS + 1, LOOKUPS)
    count, draws = BAGS * LOOKUPS, []
    for _ in range(STEPS):
        hashed = torch.randint(50, (count,), generator=generator) * 1_000_000_007 - 20_000_000_000
        draws.append((torch.cat([hashed, torch.randint(60, (2 * count,), generator=generator)]), offsets))
    return draws


def trained(configs: list[TableConfig], device: torch.device, cache: int) -> dict[str, torch.Tensor]:
    """Returns each table's rows by id after STEPS updates; gradients depend on the number of the step."""
    embedding = embedding_of(*configs, optimizer=SGD, cache=cache, device=device, seed=SEED)
    for step, (ids, offsets) in enumerate(batches()):
        out = embedding(ids, offsets)
        grad = torch.linspace(-1, 1, out.numel()).view_as(out) * (step + 1)
        out.backward(grad.to(out.device))
    return {name: weights_of(embedding, ids_of(embedding, name), name) for name in ("hashed", "indexed")}


def is_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name].view(torch.int16), b[name].view(torch.int16)) for name in a)


def test_bits_are_equal_on_any_number_of_threads(device: torch.device) -> None:
    before = torch.get_num_threads()
    configs = tables()
    try:
        torch.set_num_threads(1)
        alone = trained(configs, device, 48)
        torch.set_num_threads(4)
        assert is_same(trained(configs, device, 48), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sgd_is_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    """The reference computes SGD in float32 and rounds with the step's seed.

    Every id occurs once per batch, so no order of summation matters.
    """
    options = {"pooling": Pooling.NONE, "weight_dtype": dtype, "stochastic_rounding": True}
    embedding = one_table(device, dim=DIM, optimizer=SGD, cache=10, seed=SEED, **options)
    generator = torch.Generator().manual_seed(3)
    ids = torch.arange(30)[:, None] * 7_000_000_001 - 90_000_000_000
    weights: dict[int, torch.Tensor] = {}
    for step in range(1, 6):
        batch = ids[torch.randperm(30, generator=generator)[:10]].flatten()
        out = embedding(batch, torch.tensor([0, 10]))
        before = torch.stack([weights.get(int(i), row) for i, row in zip(batch, out.detach().cpu(), strict=True)])
        assert torch.equal(out.detach().cpu(), before)
        grad = torch.randn(10, DIM, generator=generator)
        out.backward(grad.to(out.device))
        (seed,) = rounding_seeds(SEED, ["t"], [step]).tolist()
        exact = before - torch.tensor(0.01) * grad
        after = rounded(exact, dtype, random_bits(row_numbers(batch.numpy(), seed), DIM)).float()
        weights |= {int(i): row for i, row in zip(batch, after, strict=True)}


def test_small_steps_are_not_lost(device: torch.device) -> None:
    """Steps far below the resolution of bfloat16 are lost when rounding to nearest, but add up with stochastic
    rounding.
    """
    ids, offsets = torch.arange(200), torch.tensor([0, 200])
    moved = []
    for stochastic in (False, True):
        ones = {"weight_dtype": torch.bfloat16, "init_min": 1.0, "init_max": 1.0, "pooling": Pooling.NONE}
        sgd = torch.optim.SGD, {"lr": 1e-4}
        options = {"cache": 200, "seed": SEED, "stochastic_rounding": stochastic, **ones}
        embedding = one_table(device, rows=200, dim=DIM, optimizer=sgd, **options)
        for _ in range(100):
            embedding(ids, offsets).sum().backward()
        embedding.eval()
        moved.append(float(1 - embedding(ids, offsets).mean()))
    assert moved[0] == 0.0
    # Each of 4,000 elements makes 100 steps of one in 39 (ulp 2^-8 below 1): 10,256 steps, standard deviation 100.
    assert abs(moved[1] - 0.01) < 4e-4


def test_errors_of_a_row_add_up_as_independent_ones() -> None:
    """Columns round pairwise independently: the number of elements rounded up has the variance of a binomial,
    within 10 %.
    """
    ids, dim, share = np.arange(100), 64, 0.25
    seeds = rounding_seeds(SEED, ["t"] * 2000, list(range(1, 2001))).tolist()
    ups = [(random_bits(row_numbers(ids, seed), dim) >> np.uint32(16) < share * 65536).sum() for seed in seeds]
    counts = np.array(ups, np.float64)
    count = len(ids) * dim
    assert abs(counts.mean() / count - share) < 4 * (share * (1 - share) / count / len(counts)) ** 0.5
    assert abs(counts.var() / (count * share * (1 - share)) - 1) < 0.1


def test_neighbours_are_uncorrelated() -> None:
    """Correlations of the random bits of neighbouring columns, ids and updates are within four standard
    deviations of zero.
    """
    ids, dim = np.arange(20_000), 33
    now, then = (
        (random_bits(row_numbers(ids, seed), dim) >> np.uint32(16)) / 65536 - 0.5
        for seed in rounding_seeds(SEED, ["t", "t"], [1, 2]).tolist()
    )
    pairs = [(now[:, :-gap], now[:, gap:]) for gap in (1, 2, 8, 32)]
    pairs += [(now[:-1], now[1:]), (now[:-1, 1:], now[1:, :-1]), (now, then)]
    for one, other in pairs:
        # Each column is tested separately, since random numbers within one row and step are not independent.
        each = (one * other).mean(axis=0) * 12 * len(one) ** 0.5
        assert (np.abs(each) < 4).all()


def test_seeds() -> None:
    """The rounding seed of a step depends only on the seed, the table's name and the step count."""
    base = rounding_seeds(1, ["a", "b"], [1, 1])
    assert np.array_equal(rounding_seeds(1, ["b", "a"], [1, 1]), base[::-1])
    others = [rounding_seeds(1, ["a", "b"], [2, 2]), rounding_seeds(2, ["a", "b"], [1, 1]), base]
    assert len({int(seed) for seeds in others for seed in seeds}) == 6
    assert np.array_equal(rounding_seeds(1 - 2**64, ["a", "b"], [1, 1]), base)


def test_tables_with_different_rounding_are_independent(device: torch.device) -> None:
    """A table that rounds to nearest does not affect another table, and its ids are not copied to the device."""
    both = tables()
    mixed = [both[0], replace(both[1], stochastic_rounding=False)]
    rows = trained(mixed, device, 1000)
    assert torch.equal(rows["hashed"], trained(both, device, 1000)["hashed"])
    embedding = embedding_of(*mixed, optimizer=SGD, cache=1000, device=device)
    assert [group._rounds_stochastically for group in embedding.groups] == [True, False]
    ids, offsets = batches()[0]
    batch = embedding.queue.batch(ids, ids, offsets, BAGS, np.arange(3), None)
    plans = [group.plan(batch) for group in embedding.groups]
    assert [plan.arrays.unique_ids is None for plan in plans] == [False, True]


def test_wrong_types_are_named() -> None:
    with pytest.raises(TypeError, match="'t': stochastic_rounding is 'yes'"):
        TableConfig("t", 10, 4, stochastic_rounding="yes")  # type: ignore[arg-type]
