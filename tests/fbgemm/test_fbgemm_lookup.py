"""This package's `SplitTableBatchedEmbeddingBagsCodegen` in training, compared with FBGEMM's CPU module and
plain torch.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fbgemm_cases import (
    BAGS,
    LOCATION,
    OPTIMIZERS,
    STEPS,
    Case,
    Reference,
    assert_same,
    make_both,
    make_fbgemms,
    make_ours,
    random_case,
    set_weights,
    states_of,
    step_both,
    weights_of,
)

from rec_sdk_torch.fbgemm import (
    CounterBasedRegularizationDefinition,
    CounterWeightDecayMode,
    CowClipDefinition,
    EmainplaceModeDefinition,
    EnsembleModeDefinition,
    SparseType,
    StepMode,
    moving_average,
)

SEEDS = range(6)
ON_FBGEMMS_CPU = [
    "EXACT_SGD",
    "EXACT_ADAGRAD",
    "EXACT_ROWWISE_ADAGRAD",
    "EXACT_ROWWISE_ADAGRAD L2",
    "EXACT_ROWWISE_ADAGRAD DECOUPLE",
    "EXACT_SGD clipped",
]
CLIPPED: dict[str, Any] = {"gradient_clipping": True, "max_gradient": 0.3}


@LOCATION
@pytest.mark.parametrize("name", ON_FBGEMMS_CPU)
@pytest.mark.parametrize("seed", SEEDS)
def test_training_equals_fbgemm(seed: int, name: str, location: str, device: torch.device) -> None:
    case = random_case(seed, for_fbgemm=True)
    options = CLIPPED if "clipped" in name else OPTIMIZERS[name][2]
    if "weight_decay" in options:  # FBGEMM's CPU kernel ignores weight decay for tables with one feature
        case.feature_table_map = sorted([*range(len(case.rows))] * 2)
    theirs, ours = make_both(case, device, location, optimizer=name.partition(" ")[0], **options)
    for _ in range(STEPS):
        step_both(theirs, ours, case)
    torch.testing.assert_close(weights_of(ours), weights_of(theirs))
    torch.testing.assert_close(states_of(ours), states_of(theirs))


@LOCATION
def test_in_place_averages_equal_fbgemm(location: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving_average, "ROWS_AT_ONCE", 7)
    case = random_case(1, for_fbgemm=True)
    case.weighted = False
    definition = EmainplaceModeDefinition(step_ema=2, step_start=3, step_ema_coef=0.3)
    options = {"optimizer": "EMAINPLACE_ROWWISE_ADAGRAD", "emainplace_mode": definition}
    theirs, ours = make_both(case, device, location, **options)
    for _ in range(7):
        batch = case.batch()
        assert torch.equal(ours(*batch), ours(*batch))  # forwards without an update do not count as steps
        step_both(theirs, ours, case)
    torch.testing.assert_close(weights_of(ours), weights_of(theirs))


ENSEMBLES = [
    EnsembleModeDefinition(step_ema=2, step_swap=3, step_start=4, step_ema_coef=0.3),
    EnsembleModeDefinition(step_ema=3.0, step_swap=6.0, step_ema_coef=0.5, step_mode=StepMode.NONE),
]


@LOCATION
@pytest.mark.parametrize("mode", ENSEMBLES)
def test_ensembles_equal_fbgemm(mode: EnsembleModeDefinition, location: str, device: torch.device) -> None:
    """FBGEMM has this optimizer only on GPUs. The reference is its row-wise Adagrad on the CPU, with its module's
    method `ensemble_and_swap` called before each forward.
    """
    case = random_case(1, for_fbgemm=True)
    case.weighted = False
    theirs, _ = make_both(case, device, optimizer="EXACT_ROWWISE_ADAGRAD")
    ours = make_ours(case, device, location, optimizer="ENSEMBLE_ROWWISE_ADAGRAD", ensemble_mode=mode)
    weights = theirs.split_embedding_weights()
    set_weights(ours, [weight.detach().clone() for weight in weights])
    averages = [torch.zeros_like(weight) for weight in weights]
    table = SimpleNamespace(
        embedding_specs=weights,
        split_embedding_weights=lambda: weights,
        split_optimizer_states=lambda: [(None, average) for average in averages],
    )
    for number in range(1, 15):
        table.iter_cpu = torch.tensor(number)
        with torch.no_grad():
            type(theirs).ensemble_and_swap(table, {key: float(value) for key, value in vars(mode).items()})
        if number < 14:  # not the last time: ours has already swapped, after the previous update
            step_both(theirs, ours, case)
    torch.testing.assert_close([states[1] for states in states_of(ours)], averages)


@LOCATION
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("seed", range(2))
def test_training_equals_plain_torch(seed: int, name: str, location: str, device: torch.device) -> None:
    case = random_case(100 + seed)
    cls, keywords, options = OPTIMIZERS[name]
    ours = make_ours(case, device, location, optimizer=name.partition(" ")[0], **options)
    initial = case.weights()
    set_weights(ours, initial)
    reference = Reference(case, initial, cls, keywords)
    for _ in range(STEPS):
        batch = case.batch()
        found, expected = ours(*batch), reference(*batch)
        torch.testing.assert_close(found.detach().cpu(), expected.detach().float(), rtol=1e-4, atol=1e-4)
        grad = torch.randn(expected.shape, generator=case.generator)
        expected.backward(grad.double())
        found.backward(grad.to(device))
        reference.step()
    expected = [weight.detach().float() for weight in reference.weights]
    torch.testing.assert_close(weights_of(ours), expected, rtol=1e-4, atol=1e-4)


def counting(halflife: int) -> CounterBasedRegularizationDefinition:
    return CounterBasedRegularizationDefinition(CounterWeightDecayMode.L2, counter_halflife=halflife)


@pytest.mark.parametrize(
    "modes",
    [
        (
            {},
            {
                "weight_decay_mode": "COWCLIP",
                "cowclip_regularization": CowClipDefinition(weight_norm_coefficient=0.1, lower_bound=0.01),
            },
        ),
        [
            {"weight_decay_mode": "COUNTER", "weight_decay": 0.1, "counter_based_regularization": counting(halflife)}
            for halflife in (2, 50)
        ],
    ],
    ids=["cowclip", "counter"],
)
def test_definitions_reach_the_optimizer(modes: Any, device: torch.device) -> None:
    """Definitions of optimizer modes have an effect; tests/optim compares their formulas with FBGEMM's kernel."""
    case = random_case(0)
    weights, batch = case.weights(), case.batch()
    modules = [make_ours(case, device, optimizer="EXACT_ROWWISE_ADAGRAD", eps=1e-3, **mode) for mode in modes]
    for module in modules:
        set_weights(module, weights)
        for _ in range(3):
            (module(*batch) * 10).sum().backward()
    steps = [[(now - was).norm() for now, was in zip(weights_of(module), weights, strict=True)] for module in modules]
    assert all(0 < second != first for first, second in zip(*steps, strict=True))
    assert modes[0] or sum(steps[1]) < 0.1 * sum(steps[0]), "clipped"
    assert [len(states) for states in modules[1].split_optimizer_states()] == [3] * len(case.rows)


def test_optimizer_none_returns_gradients(device: torch.device) -> None:
    case = random_case(0)
    module = make_ours(case, device, optimizer="NONE")
    weights = [weight.clone() for weight in weights_of(module)]
    module(*case.batch()).sum().backward()
    gradients = module.take_gradients()
    with pytest.raises(NotImplementedError, match=r"hyper-parameters \['lr'\]: NONE"):
        module.set_learning_rate(0.1)
    assert module.get_learning_rate() == 0
    assert sum(len(gradient.ids) for gradient in gradients.values()) > 0
    assert_same(weights_of(module), weights)
    for gradient in gradients.values():
        assert gradient.sparse(1000).to_dense().abs().sum() == gradient.rows.abs().sum()
    assert not any(len(gradient.ids) for gradient in module.take_gradients().values())


def test_the_bound_of_gradients_is_a_number_above_0(device: torch.device) -> None:
    for bound in (0.0, -1.0, float("nan"), "1", 1e39):
        with pytest.raises(ValueError, match=r"max_gradient is .*, must be a number above 0"):
            make_ours(random_case(1), device, gradient_clipping=True, max_gradient=bound)


@pytest.mark.parametrize("seed", SEEDS)
def test_batch_sizes_per_feature_and_rank(seed: int, device: torch.device) -> None:
    case = random_case(200 + seed, for_fbgemm=True)
    case.pooling, case.weighted = ("SUM", True) if seed % 2 else ("MEAN", False)
    features = len(case.feature_table_map)
    sizes = torch.randint(4, (features, 3), generator=case.generator).tolist()
    theirs, ours = make_both(case, device)
    for now in (sizes, sizes[::-1]):
        bags = [sum(of_feature) for of_feature in now]
        if sum(bags):
            step_both(theirs, ours, case, bags, batch_size_per_feature_per_rank=now)
    none = case.batch([0] * features)  # FBGEMM's CPU kernel does not accept an empty batch
    assert ours(*none, batch_size_per_feature_per_rank=[[0] * 3] * features).shape == (0,)
    torch.testing.assert_close(weights_of(ours), weights_of(theirs))


@pytest.mark.parametrize("variable", [False, True])
def test_features_whose_weights_need_no_gradient(variable: bool, device: torch.device) -> None:
    case = random_case(3, for_fbgemm=True)
    case.pooling, case.weighted, case.feature_table_map = "SUM", True, [0] * 3
    case.dims, case.rows = case.dims[:1], case.rows[:1]
    sizes = [[1, 2], [3, 1], [0, 4]] if variable else None
    theirs, ours = make_both(case, device)
    indices, offsets, weights = case.batch([sum(s) for s in sizes] if sizes else None)
    assert weights is not None
    grads = []
    for module, cast in ((theirs, torch.int64), (ours, offsets.dtype)):
        own = weights.clone().requires_grad_()
        wanted = torch.tensor([1, 0, 1], dtype=torch.int32)
        module(indices.long(), offsets.to(cast), own, wanted, sizes).sum().backward()
        grads.append(own.grad)
    torch.testing.assert_close(*grads)
    assert grads[1].count_nonzero() < grads[1].numel()
    with pytest.raises(ValueError, match="feature_requires_grad has 2 entries"):
        ours(indices, offsets, weights.requires_grad_(), torch.ones(2), sizes)


@pytest.mark.parametrize("mode", ["WARNING", "IGNORE", "V2_IGNORE"])
@pytest.mark.parametrize("bad", [9_999, -3])
def test_ids_out_of_range_read_row_0(bad: int, mode: str, device: torch.device) -> None:
    """Ids out of range read row 0, which also gets their gradients."""
    case = random_case(0, for_fbgemm=True)
    case.pooling, case.weighted = "SUM", False
    theirs, ours = make_both(case, device, bounds_check_mode=mode)
    indices, offsets, _ = case.batch()
    indices[::3] = bad
    if mode == "WARNING":
        with pytest.warns(UserWarning, match=f"out of range .such as {bad}."):
            found = ours(indices, offsets)
    else:
        found = ours(indices, offsets)
    expected = theirs(indices.long(), offsets.long())
    torch.testing.assert_close(found.detach().cpu(), expected.detach())
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(weights_of(ours), weights_of(theirs))


@pytest.mark.parametrize(
    "offsets", [[1, 1, 2, 3, 4], [0, 3, 2, 3, 4], [0, 1, 2, 3, 9], [0, 1, 2, 3, 3], [0, -1, 2, 7, 4]]
)
def test_unsorted_offsets_are_sorted(offsets: list[int], device: torch.device) -> None:
    case = Case(0, "SUM", True, [4], [64], [0, 0], torch.int64, torch.int64)
    initial, indices, weights = case.weights(), torch.tensor([5, 6, 7, 8]), torch.rand(4)
    theirs = make_fbgemms(case, bounds_check_mode="IGNORE")
    theirs.split_embedding_weights()[0].copy_(initial[0])
    expected = theirs(indices, torch.tensor(offsets), weights)
    for mode in ("IGNORE", "WARNING", "FATAL", "NONE"):
        ours = make_ours(case, device, bounds_check_mode=mode)
        set_weights(ours, initial)
        if mode in ("FATAL", "NONE"):
            with pytest.raises(ValueError, match="offsets must"):
                ours(indices, torch.tensor(offsets), weights)
        elif mode == "WARNING":
            with pytest.warns(UserWarning, match="offsets must .*; they were put in order"):
                found = ours(indices, torch.tensor(offsets), weights)
        else:
            found = ours(indices, torch.tensor(offsets), weights)
    torch.testing.assert_close(found.detach().cpu(), expected.detach())


def test_ids_out_of_range_are_fatal(device: torch.device) -> None:
    case = random_case(0)
    ours = make_ours(case, device, bounds_check_mode="FATAL")
    indices, offsets, weights = case.batch()
    indices[0] = -1
    with pytest.raises(IndexError, match="-1"):
        ours(indices, offsets, weights)


@pytest.mark.parametrize("name", ["FP16", "BF16"])
def test_data_types_of_the_output(name: str, device: torch.device) -> None:
    """Outputs are rounded once from float32, as in FBGEMM."""
    case = random_case(2)
    dtype = {"FP16": torch.float16, "BF16": torch.bfloat16}[name]
    plain, ours = make_ours(case, device), make_ours(case, device, output_dtype=name)
    initial, batch = case.weights(), case.batch()
    for module in (plain, ours):
        set_weights(module, initial)
    expected, found = plain(*batch), ours(*batch)
    assert found.dtype is dtype
    torch.testing.assert_close(found, expected.to(dtype), rtol=0, atol=0)
    grad = torch.randn(found.shape, generator=case.generator).to(dtype).to(device)
    found.backward(grad)
    expected.backward(grad.float())
    assert_same(weights_of(ours), weights_of(plain))


@LOCATION
@pytest.mark.parametrize("rounding", [False, True])
@pytest.mark.parametrize("name", ["FP16", torch.bfloat16])
def test_data_types_of_weights(name: Any, rounding: bool, location: str, device: torch.device) -> None:
    """Results are bit-identical to a `TableBatchedEmbedding` with these tables, whose rounding tests/tbe tests."""
    case = random_case(2)
    ours = make_ours(case, device, location, weights_precision=name, stochastic_rounding=rounding)
    dtype = torch.float16 if name == "FP16" else name
    assert [table.rounds_stochastically for table in ours.tables.tables] == [rounding] * len(case.rows)
    initial, batch = case.weights(), case.batch()
    set_weights(ours, initial)
    assert [weight.dtype for weight in ours.split_embedding_weights()] == [dtype] * len(case.rows)
    ours(*batch).sum().backward()
    reference = Reference(case, [weight.to(dtype) for weight in initial], torch.optim.SGD, {})
    reference(*batch).sum().backward()
    reference.step()
    found = [weight.double() for weight in weights_of(ours)]
    torch.testing.assert_close(found, [weight.detach() for weight in reference.weights], rtol=1e-2, atol=1e-2)


@LOCATION
@pytest.mark.parametrize(("weights", "cache"), [("FP32", "BF16"), ("FP16", "FP32"), ("BF16", torch.float16)])
def test_precision_of_the_cache(weights: str, cache: Any, location: str, device: torch.device) -> None:
    """The option applies to cached tables, as in FBGEMM; results are bit-identical to a `TableBatchedEmbedding`."""
    case = random_case(2)
    options = {"weights_precision": weights, "stochastic_rounding": False}
    ours = make_ours(case, device, location, cache_precision=cache, **options)
    cached = SparseType[cache].as_dtype() if isinstance(cache, str) else cache
    stored = SparseType[weights].as_dtype()
    seen = [group.swap.weights.dtype for group in ours.tables.groups]
    assert seen == [cached if "MANAGED" in location else stored] * len(seen)
    plain = make_ours(case, device, location, **options)
    initial, batch = case.weights(), case.batch()
    for module in (ours, plain):
        set_weights(module, initial)
        module(*batch).sum().backward()
    assert [weight.dtype for weight in weights_of(ours)] == [stored] * len(case.rows)
    torch.testing.assert_close(weights_of(ours), weights_of(plain), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("pooling", ["SUM", "NONE"])
def test_empty_batches(pooling: str, device: torch.device) -> None:
    case = random_case(4)
    case.dims, case.pooling = [8] * len(case.rows), pooling
    ours = make_ours(case, device)
    none, bags = torch.empty(0, dtype=torch.int64), len(case.feature_table_map) * BAGS
    for offsets in (torch.zeros(1, dtype=torch.int64), torch.zeros(bags + 1, dtype=torch.int64)):
        out = ours(none, offsets)
        size = (offsets.numel() - 1) // len(case.feature_table_map)
        assert out.shape == ((0, 8) if pooling == "NONE" else (size, 8 * len(case.feature_table_map)))
        out.sum().backward()
    assert all(not weight.any() for weight in ours.split_embedding_weights())


def test_batches_are_prefetched_before_their_weights_are_known(device: torch.device) -> None:
    case = random_case(5)
    case.pooling = "SUM"
    modules = [make_ours(case, device, "MANAGED_CACHING", cache_load_factor=0.9) for _ in "ab"]
    batches = []
    for weighted in (False, True, False):
        case.weighted = weighted
        batches += [case.batch() for _ in range(8)]
    plain, ahead = modules
    ahead.prefetch(*batches[0][:2])
    for number, batch in enumerate(batches):
        for indices, offsets, _ in batches[number + 1 : number + 2]:
            ahead.prefetch(indices, offsets)
        ahead.tables.queue.wait()
        out, expected = ahead(*batch), plain(*batch)
        assert torch.equal(out, expected)
        assert len(ahead.tables.queue) <= 3  # the next batch, and one that was planned without weights
        out.sum().backward()
        expected.sum().backward()
    assert ahead.tables.cache_stats()["depth_reached"] > 0


@pytest.mark.parametrize("training", [False, True])
def test_prefetched_batches_give_the_same_bits(training: bool, device: torch.device) -> None:
    case = random_case(5)
    case.weighted = False
    modules = [make_ours(case, device, "MANAGED_CACHING", prefetch_pipeline=True, cache_load_factor=0.9) for _ in "ab"]
    initial, batches = case.weights(), [case.batch() for _ in range(8)]
    for module in modules:
        set_weights(module, initial)
        module(*batches[0]).sum().backward()
        module.train(training)
    plain, ahead = modules
    for indices, offsets, _ in batches[1:4]:
        ahead.prefetch(indices, offsets, forward_stream=None)
    for number, batch in enumerate(batches[1:]):
        if number + 4 < len(batches):
            ahead.prefetch(*batches[number + 4][:2])
        ahead.tables.queue.wait()
        found, expected = ahead(*batch), plain(*batch)
        assert torch.equal(found, expected)
        if training:
            found.sum().backward()
            expected.sum().backward()
    assert (ahead.tables.cache_stats()["depth_reached"] > 0) is training
    assert_same(weights_of(ahead), weights_of(plain))
