"""Training with `SplitTableBatchedEmbeddingBagsCodegen`, against FBGEMM's own on the CPU and against plain torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fbgemm_cases import BAGS, OPTIMIZERS, STEPS, Case, Reference, make_ours, random_case, set_weights

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
LOCATIONS = ["resident", "MANAGED_CACHING"]
ON_FBGEMMS_CPU = [
    "EXACT_SGD",
    "EXACT_ADAGRAD",
    "EXACT_ROWWISE_ADAGRAD",
    "EXACT_ROWWISE_ADAGRAD L2",
    "EXACT_ROWWISE_ADAGRAD DECOUPLE",
]


def make_fbgemms(case: Case, optimizer: str, **options: Any) -> Any:
    """FBGEMM's module on the CPU."""
    training = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    place = (training.EmbeddingLocation.HOST, training.ComputeDevice.CPU)
    if "weight_decay_mode" in options:
        options["weight_decay_mode"] = training.WeightDecayMode[options["weight_decay_mode"]]
    return training.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, *place) for rows, dim in zip(case.rows, case.dims, strict=True)],
        feature_table_map=case.feature_table_map,
        pooling_mode=training.PoolingMode[case.pooling],
        optimizer=training.OptimType[optimizer],
        device=torch.device("cpu"),
        learning_rate=0.05,
        **options,
    )


@pytest.mark.parametrize("location", LOCATIONS)
@pytest.mark.parametrize("name", ON_FBGEMMS_CPU)
@pytest.mark.parametrize("seed", SEEDS)
def test_training_is_fbgemms(seed: int, name: str, location: str, device: torch.device) -> None:
    case = random_case(seed, for_fbgemm=True)
    optimizer, options = name.partition(" ")[0], OPTIMIZERS[name][2]
    if "weight_decay" in options:  # FBGEMM's CPU kernel forgets it for tables of one feature
        case.feature_table_map = sorted([*range(len(case.rows))] * 2)
    theirs = make_fbgemms(case, optimizer, **options)
    ours = make_ours(case, device, location, optimizer=optimizer, **options)
    initial = case.weights()
    for weight, values in zip(theirs.split_embedding_weights(), initial, strict=True):
        weight.copy_(values)
    set_weights(ours, initial)
    for _ in range(STEPS):
        indices, offsets, weights = case.batch()
        mine = None if weights is None else weights.clone().requires_grad_()
        its = None if weights is None else weights.clone().requires_grad_()
        # FBGEMM's kernels read ids and offsets of one type, and its module casts the latter only.
        expected = theirs(indices.long(), offsets.long(), its).mul_(0.5)  # in place: an output is the caller's
        found = ours(indices, offsets, mine).mul_(0.5)
        torch.testing.assert_close(found.detach().cpu(), expected.detach())
        grad = torch.randn(expected.shape, generator=case.generator)
        expected.backward(grad)
        found.backward(grad.to(device))
        if mine is not None:
            torch.testing.assert_close(mine.grad, its.grad)
    for found, expected in zip(ours.split_embedding_weights(), theirs.split_embedding_weights(), strict=True):
        torch.testing.assert_close(found.cpu(), expected)
    for mine, its in zip(ours.split_optimizer_states(), theirs.split_optimizer_states(), strict=True):
        for found, expected in zip(mine, its, strict=True):
            torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("location", LOCATIONS)
def test_averages_in_place_are_fbgemms(location: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving_average, "ROWS_AT_ONCE", 7)
    case = random_case(1, for_fbgemm=True)
    case.weighted = False
    optimizer = "EMAINPLACE_ROWWISE_ADAGRAD"
    definition = EmainplaceModeDefinition(step_ema=2, step_start=3, step_ema_coef=0.3)
    theirs = make_fbgemms(case, optimizer, emainplace_mode=definition)
    ours = make_ours(case, device, location, optimizer=optimizer, emainplace_mode=definition)
    initial = case.weights()
    for weight, values in zip(theirs.split_embedding_weights(), initial, strict=True):
        weight.copy_(values)
    set_weights(ours, initial)
    for _ in range(7):
        indices, offsets, _ = case.batch()
        expected, found = theirs(indices.long(), offsets.long()), ours(indices, offsets)
        torch.testing.assert_close(found.detach().cpu(), expected.detach())
        assert torch.equal(ours(indices, offsets), found)  # only the forward that an update follows counts
        grad = torch.randn(expected.shape, generator=case.generator)
        expected.backward(grad)
        found.backward(grad.to(device))
    for found, expected in zip(ours.split_embedding_weights(), theirs.split_embedding_weights(), strict=True):
        torch.testing.assert_close(found.cpu(), expected)


ENSEMBLES = [
    EnsembleModeDefinition(step_ema=2, step_swap=3, step_start=4, step_ema_coef=0.3),
    EnsembleModeDefinition(step_ema=3.0, step_swap=6.0, step_ema_coef=0.5, step_mode=StepMode.NONE),
]


@pytest.mark.parametrize("location", LOCATIONS)
@pytest.mark.parametrize("mode", ENSEMBLES)
def test_ensembles_are_fbgemms(mode: EnsembleModeDefinition, location: str, device: torch.device) -> None:
    """FBGEMM has this optimizer on GPUs: row-wise Adagrad, and this method of its module before each forward."""
    case = random_case(1, for_fbgemm=True)
    case.weighted = False
    theirs = make_fbgemms(case, "EXACT_ROWWISE_ADAGRAD")
    ours = make_ours(case, device, location, optimizer="ENSEMBLE_ROWWISE_ADAGRAD", ensemble_mode=mode)
    weights, initial = theirs.split_embedding_weights(), case.weights()
    for weight, values in zip(weights, initial, strict=True):
        weight.copy_(values)
    set_weights(ours, initial)
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
        if number == 14:  # ours has done it, after the update before
            break
        indices, offsets, _ = case.batch()
        expected, found = theirs(indices.long(), offsets.long()), ours(indices, offsets)
        torch.testing.assert_close(found.detach().cpu(), expected.detach())
        grad = torch.randn(expected.shape, generator=case.generator)
        expected.backward(grad)
        found.backward(grad.to(device))
    for mine, average in zip(ours.split_optimizer_states(), averages, strict=True):
        torch.testing.assert_close(mine[1].cpu(), average)


@pytest.mark.parametrize("location", LOCATIONS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("seed", range(2))
def test_training_is_plain_torchs(seed: int, name: str, location: str, device: torch.device) -> None:
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
    for found, expected in zip(ours.split_embedding_weights(), reference.weights, strict=True):
        torch.testing.assert_close(found.cpu(), expected.detach().float(), rtol=1e-4, atol=1e-4)


def test_cowclip_is_the_tables(device: torch.device) -> None:
    """Its formula is compared with FBGEMM's kernel in tests/optim; here, that its definition arrives."""
    case = random_case(0)
    weights = case.weights()
    definition = CowClipDefinition(weight_norm_coefficient=0.1, lower_bound=0.01)
    modes: list[dict[str, Any]] = [{}, {"weight_decay_mode": "COWCLIP", "cowclip_regularization": definition}]
    modules = [make_ours(case, device, optimizer="EXACT_ROWWISE_ADAGRAD", **mode) for mode in modes]
    batch = case.batch()
    steps = []
    for module in modules:
        set_weights(module, weights)
        out = module(*batch)
        out.backward(torch.ones_like(out) * 10)
        after = torch.cat([w.flatten().cpu() for w in module.split_embedding_weights()])
        steps.append((after - torch.cat([w.flatten() for w in weights])).norm())
    assert 0 < steps[1] < 0.1 * steps[0]
    assert [len(states) for states in modules[1].split_optimizer_states()] == [3] * len(case.rows)


def test_counter_is_fbgemms(device: torch.device) -> None:
    """Definitions of all kinds are compared with FBGEMM's kernel in tests/optim; here, that one arrives."""
    case = random_case(0)
    weights = case.weights()
    mode = {"optimizer": "EXACT_ROWWISE_ADAGRAD", "weight_decay_mode": "COUNTER", "weight_decay": 0.1, "eps": 1e-3}
    modules = []
    for halflife in (2, 50):
        definition = CounterBasedRegularizationDefinition(
            counter_weight_decay_mode=CounterWeightDecayMode.L2, counter_halflife=halflife
        )
        modules.append(make_ours(case, device, **mode, counter_based_regularization=definition))
        set_weights(modules[-1], weights)
    batch = case.batch()
    for _ in range(3):
        for module in modules:
            out = module(*batch)
            out.backward(torch.ones_like(out))
    first, second = (torch.cat([w.flatten().cpu() for w in m.split_embedding_weights()]) for m in modules)
    assert not torch.equal(first, second)
    assert [len(states) for states in modules[1].split_optimizer_states()] == [3] * len(case.rows)


def test_none_hands_out_gradients(device: torch.device) -> None:
    case = random_case(0)
    module = make_ours(case, device, optimizer="NONE")
    weights = [weight.detach().cpu().clone() for weight in module.split_embedding_weights()]
    batch = case.batch()
    out = module(*batch)
    out.backward(torch.ones_like(out))
    gradients = module.take_gradients()
    with pytest.raises(NotImplementedError, match=r"hyper-parameters \['lr'\]: NONE"):
        module.set_learning_rate(0.1)
    assert module.get_learning_rate() == 0
    assert sum(len(gradient.ids) for gradient in gradients.values()) > 0
    for before, after in zip(weights, module.split_embedding_weights(), strict=True):
        assert torch.equal(before, after.cpu())
    for gradient in gradients.values():
        assert gradient.sparse(1000).to_dense().abs().sum() == gradient.rows.abs().sum()
    assert not any(len(gradient.ids) for gradient in module.take_gradients().values())


@pytest.mark.parametrize("location", LOCATIONS)
@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_are_clipped(seed: int, location: str, device: torch.device) -> None:
    case = random_case(seed, for_fbgemm=True)
    options = {"gradient_clipping": True, "max_gradient": 0.3}
    theirs, ours = make_fbgemms(case, "EXACT_SGD", **options), make_ours(case, device, location, **options)
    initial = case.weights()
    for weight, values in zip(theirs.split_embedding_weights(), initial, strict=True):
        weight.copy_(values)
    set_weights(ours, initial)
    for _ in range(3):
        indices, offsets, weights = case.batch()
        expected, found = theirs(indices.long(), offsets.long(), weights), ours(indices, offsets, weights)
        gradient = torch.randn(expected.shape, generator=case.generator)
        expected.backward(gradient)
        found.backward(gradient.to(device))
    for ours_now, theirs_now in zip(ours.split_embedding_weights(), theirs.split_embedding_weights(), strict=True):
        torch.testing.assert_close(ours_now.cpu(), theirs_now.detach(), rtol=1e-4, atol=1e-5)


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
    theirs, ours = make_fbgemms(case, "EXACT_SGD"), make_ours(case, device)
    initial = case.weights()
    for weight, values in zip(theirs.split_embedding_weights(), initial, strict=True):
        weight.copy_(values)
    set_weights(ours, initial)
    for now in (sizes, sizes[::-1], [[0] * 3 for _ in sizes]):
        indices, offsets, weights = case.batch([sum(of_feature) for of_feature in now])
        found = ours(indices, offsets, weights, batch_size_per_feature_per_rank=now)
        if not sum(map(sum, now)):  # which FBGEMM's CPU kernel does not take
            assert found.shape == (0,)
            continue
        expected = theirs(indices.long(), offsets.long(), weights, batch_size_per_feature_per_rank=now)
        torch.testing.assert_close(found.detach().cpu(), expected.detach().flatten())
        grad = torch.randn(found.shape, generator=case.generator)
        found.backward(grad.to(device))
        expected.backward(grad.view_as(expected))
    for found, expected in zip(ours.split_embedding_weights(), theirs.split_embedding_weights(), strict=True):
        torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("variable", [False, True])
def test_features_whose_weights_need_no_gradient(variable: bool, device: torch.device) -> None:
    case = random_case(3, for_fbgemm=True)
    case.pooling, case.weighted, case.feature_table_map = "SUM", True, [0] * 3
    case.dims, case.rows = case.dims[:1], case.rows[:1]
    sizes = [[1, 2], [3, 1], [0, 4]] if variable else None
    theirs, ours = make_fbgemms(case, "EXACT_SGD"), make_ours(case, device)
    initial = case.weights()
    theirs.split_embedding_weights()[0].copy_(initial[0])
    set_weights(ours, initial)
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
    """And row 0 has their gradient."""
    case = random_case(0, for_fbgemm=True)
    case.pooling, case.weighted = "SUM", False
    training = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    theirs = make_fbgemms(case, "EXACT_SGD", bounds_check_mode=training.BoundsCheckMode[mode])
    ours = make_ours(case, device, bounds_check_mode=training.BoundsCheckMode[mode])
    initial = case.weights()
    for weight, values in zip(theirs.split_embedding_weights(), initial, strict=True):
        weight.copy_(values)
    set_weights(ours, initial)
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
    for mine, its in zip(ours.split_embedding_weights(), theirs.split_embedding_weights(), strict=True):
        torch.testing.assert_close(mine.cpu(), its)


@pytest.mark.parametrize(
    "offsets", [[1, 1, 2, 3, 4], [0, 3, 2, 3, 4], [0, 1, 2, 3, 9], [0, 1, 2, 3, 3], [0, -1, 2, 7, 4]]
)
def test_offsets_in_disorder_are_put_in_order(offsets: list[int], device: torch.device) -> None:
    case = Case(0, "SUM", True, [4], [64], [0, 0], torch.int64, torch.int64)
    training = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    initial, indices, weights = case.weights(), torch.tensor([5, 6, 7, 8]), torch.rand(4)
    theirs = make_fbgemms(case, "EXACT_SGD", bounds_check_mode=training.BoundsCheckMode.IGNORE)
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
    """Rounded once from float32, and so is FBGEMM's."""
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
    for mine, its in zip(ours.split_embedding_weights(), plain.split_embedding_weights(), strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("location", LOCATIONS)
@pytest.mark.parametrize("rounding", [False, True])
@pytest.mark.parametrize("name", ["FP16", torch.bfloat16])
def test_data_types_of_weights(name: Any, rounding: bool, location: str, device: torch.device) -> None:
    """With the bits of a `TableBatchedEmbedding` of these tables, whose rounding is tested in tests/tbe."""
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
    for mine, its in zip(ours.split_embedding_weights(), reference.weights, strict=True):
        torch.testing.assert_close(mine.cpu().double(), its.detach(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("location", LOCATIONS)
@pytest.mark.parametrize(("weights", "cache"), [("FP32", "BF16"), ("FP16", "FP32"), ("BF16", torch.float16)])
def test_precision_of_the_cache(weights: str, cache: Any, location: str, device: torch.device) -> None:
    """Cached tables have it, as FBGEMM's; with the bits of a `TableBatchedEmbedding`, as tests/tbe has them."""
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
    for mine, its in zip(ours.split_embedding_weights(), plain.split_embedding_weights(), strict=True):
        assert mine.dtype == its.dtype == stored
        torch.testing.assert_close(mine.cpu(), its.cpu(), rtol=1e-2, atol=1e-2)


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
        assert len(ahead.tables.queue) <= 3  # the next, and what was planned otherwise where weights begin
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
    for mine, its in zip(ahead.split_embedding_weights(), plain.split_embedding_weights(), strict=True):
        assert torch.equal(mine, its)
