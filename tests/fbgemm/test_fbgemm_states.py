"""Methods of `SplitTableBatchedEmbeddingBagsCodegen`: weights, states, options, counters, state dicts."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_cases import (
    BAGS,
    LOCATION,
    LR,
    OPTIMIZERS,
    Case,
    Reference,
    assert_same,
    make_fbgemms,
    make_ours,
    random_case,
    set_weights,
    states_of,
    weights_of,
)

from rec_sdk_torch import Saver
from rec_sdk_torch.fbgemm import SplitTableBatchedEmbeddingBagsCodegen, placement, states


def small_case(pooling: str = "SUM") -> Case:
    return Case(7, pooling, False, [8, 8], [40, 50], [0, 1], torch.int64, torch.int64)


def step(module: Any, case: Case) -> None:
    out = module(*case.batch())
    out.backward(torch.ones_like(out))


# ---- weights and states


@LOCATION
@pytest.mark.parametrize("optimizer", ["PARTIAL_ROWWISE_ADAM", "ENSEMBLE_ROWWISE_ADAGRAD", "LAMB"])
def test_states_in_16_bits(optimizer: str, location: str, device: torch.device) -> None:
    """FBGEMM's CPU kernels have no 16-bit states: after one update, states must equal its float32 states, rounded."""
    case = small_case()
    types = {"momentum1": "FP16", "momentum2": "BF16"}
    given = {"optimizer": optimizer, "location": location}
    half, single = make_ours(case, device, optimizer_state_dtypes=types, **given), make_ours(case, device, **given)
    set_weights(half, [weight.clone() for weight in weights_of(single)])
    batch = case.batch()
    for module in (half, single):
        module(*batch).sum().backward()
    dtypes = torch.float16, torch.bfloat16
    expected = [[state.to(dtype) for state, dtype in zip(of, dtypes, strict=True)] for of in states_of(single)]
    assert_same(states_of(half), expected)
    assert all(first.any() for first, _ in expected)
    assert_same(weights_of(half), weights_of(single))
    again = make_ours(case, device, optimizer_state_dtypes=types, **given)
    again.load_state_dict(half.state_dict())
    assert_same(states_of(again), states_of(half))


@pytest.mark.parametrize("pooling", ["SUM", "NONE"])
def test_weights_of_resident_tables_are_views(
    pooling: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lookups read rows written through the views, and the views show updates, even after the layout has changed."""
    monkeypatch.setattr(placement, "ROWS_AT_ONCE", 7)
    case = small_case(pooling)
    first = make_ours(case, device, optimizer="EXACT_ADAGRAD")
    for copied in (False, True):
        module = copy.deepcopy(first) if copied else first
        before = module.split_embedding_weights()
        assert module.split_optimizer_states()[0][0].any() == copied  # a copy has the optimizer states too
        module.split_optimizer_states()[0][0].zero_()
        for table, weight in enumerate(before):
            weight.copy_(torch.arange(weight.numel()).view(weight.shape) + 1000 * table)
        ids, offsets = torch.tensor([3, 39, 49]), torch.tensor([0, 2, 3])
        out = module(ids, offsets)
        rows = [before[0][3], before[0][39], before[1][49]]
        expected = torch.stack(rows) if pooling == "NONE" else torch.cat([rows[0] + rows[1], rows[2]])[None]
        assert torch.equal(out, expected)
        old = before[0][3].clone()
        out.backward(torch.ones_like(out))
        torch.testing.assert_close(before[0][3], old - LR / (1 + 1e-8))
        assert torch.equal(module.split_optimizer_states()[0][0][3].cpu(), torch.ones(8))
        module.split_optimizer_states()[0][0].fill_(3)
        module(ids, offsets).sum().backward()
        torch.testing.assert_close(before[0][3], old - LR - LR / 2)


def test_copies_of_cached_tables_refuse_writes(device: torch.device) -> None:
    module = make_ours(small_case(), device, "MANAGED_CACHING", optimizer="ADAM")
    weight = module.split_embedding_weights()[0]
    state = module.split_optimizer_states()[0][1]
    writes = [
        lambda t: t.copy_(t + 1),
        lambda t: t.__setitem__(0, 1),
        lambda t: t[2:].zero_(),
        lambda t: t.data.uniform_(),
        torch.nn.init.ones_,
        lambda t: torch.add(t, 1, out=t),
        lambda t: t.__iadd__(1),
    ]
    for write in writes:
        for tensor in (weight, state):
            with pytest.raises(RuntimeError, match="on a copy of a table that the device caches"):
                write(tensor)
    assert type(weight + 1) is torch.Tensor
    weight.clone().fill_(1)
    assert not weight.any()


@LOCATION
@pytest.mark.parametrize("precision", ["FP32", "FP16"])
def test_uniform_weights_equal_fbgemm(
    precision: str, location: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type != "cpu":
        pytest.skip("an accelerator's resident tables are drawn by its own generator")
    monkeypatch.setattr(states, "ROWS_AT_ONCE", 7)
    split = pytest.importorskip("fbgemm_gpu.split_embedding_configs")
    case, drawn = small_case(), []
    for make in (
        lambda: make_fbgemms(case, weights_precision=split.SparseType[precision]),
        lambda: make_ours(case, device, location, weights_precision=precision),
    ):
        torch.manual_seed(3)
        module = make()  # draws nothing
        module.init_embedding_weights_uniform(-0.25, 0.5)
        drawn.append(weights_of(module))
    assert_same(*drawn)


@LOCATION
def test_uniform_weights_are_in_their_range(location: str, device: torch.device) -> None:
    module = make_ours(small_case(), device, location)
    module.init_embedding_weights_uniform(0.25, 0.5)
    for weight in module.split_embedding_weights():
        assert ((weight >= 0.25) & (weight < 0.5)).all()
        assert weight.unique().numel() > 0.9 * weight.numel()


NAMES = {
    "EXACT_SGD": [],
    "EXACT_ADAGRAD": ["sum"],
    "EXACT_ROWWISE_ADAGRAD": ["sum"],
    "ADAM": ["exp_avg", "exp_avg_sq"],
    "LAMB": ["exp_avg", "exp_avg_sq"],
    "PARTIAL_ROWWISE_ADAM": ["exp_avg", "exp_avg_sq"],
    "PARTIAL_ROWWISE_LAMB": ["exp_avg", "exp_avg_sq"],
    "LARS_SGD": ["momentum"],
    "ENSEMBLE_ROWWISE_ADAGRAD": ["sum", "sparse_ema"],
    "EXACT_ROWWISE_ADAGRAD DECOUPLE_GLOBAL": ["sum", "prev_iter", "iter"],
}


@LOCATION
@pytest.mark.parametrize("name", NAMES)
def test_states_have_fbgemms_order_shapes_and_names(name: str, location: str, device: torch.device) -> None:
    case = small_case()
    module = make_ours(case, device, location, optimizer=name.partition(" ")[0], **OPTIMIZERS[name][2])
    set_weights(module, case.weights())
    step(module, case)
    found = module.split_optimizer_states()
    named = module.get_optimizer_state()
    if not NAMES[name]:
        assert found == [] == named
        return
    assert [list(of_table) for of_table in named] == [NAMES[name]] * 2
    for rows, of_table, by_name in zip(case.rows, found, named, strict=True):
        for state, (title, same) in zip(of_table, by_name.items(), strict=False):
            rowwise = title in ("prev_iter",) or ("ROWWISE" in name and title not in ("exp_avg", "sparse_ema"))
            assert state.shape == ((rows,) if rowwise else (rows, 8))
            assert torch.equal(state, same)
            assert state.any()


# ---- options


@LOCATION
def test_options_change_between_updates(location: str, device: torch.device) -> None:
    """After a change, updates follow the formula with the new options, including Adam's step count."""
    case = small_case()
    cls, keywords, options = OPTIMIZERS["ADAM"]
    module, initial = make_ours(case, device, location, optimizer="ADAM", **options), case.weights()
    set_weights(module, initial)
    reference = Reference(case, initial, cls, keywords)
    assert module.get_learning_rate() == LR
    assert module.iter.tolist() == [0]
    module.set_optimizer_step(4)
    for optimizer, weight in zip(reference.optimizers, reference.weights, strict=True):
        optimizer.state[weight]["step"] = 4
    for changes in ({}, {"lr": 0.5}, {"eps": 0.1, "beta1": 0.5}, {"beta2": 0.5}):
        module.update_hyper_parameters(changes)
        for optimizer in reference.optimizers:
            group = optimizer.param_groups[0]
            betas = changes.get("beta1", group["betas"][0]), changes.get("beta2", group["betas"][1])
            group.update({name: value for name, value in changes.items() if name in group}, betas=betas)
        batch = case.batch()
        expected = reference(*batch)
        grad = torch.randn(expected.shape, generator=case.generator)
        expected.backward(grad.double())
        reference.step()
        module(*batch).backward(grad.to(device))
    assert module.iter.tolist() == [8]
    module.set_learning_rate(0.0)
    assert module.get_learning_rate() == 0.0
    step(module, case)
    expected = [weight.detach().float() for weight in reference.weights]
    torch.testing.assert_close(weights_of(module), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match=r"hyper-parameters \['other'\]: ADAM has"):
        module.update_hyper_parameters({"lr": 3.0, "other": 0.1})
    assert module.get_learning_rate() == 0.0
    with pytest.raises(ValueError, match="step is -1"):
        module.set_optimizer_step(-1)


def test_lower_bound_of_global_decay_can_change(device: torch.device) -> None:
    name = "EXACT_ROWWISE_ADAGRAD DECOUPLE_GLOBAL"
    module = make_ours(small_case(), device, optimizer="EXACT_ROWWISE_ADAGRAD", **OPTIMIZERS[name][2])
    module.update_hyper_parameters({"lower_bound": 0.25, "weight_decay": 0.3})
    assert (module._optimizer.options["gwd_lower_bound"], module._optimizer.options["weight_decay"]) == (0.25, 0.3)


# ---- the cache


def test_sizes_of_the_cache(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    case = small_case()
    sizes = {
        "resident": ({}, [40, 50]),
        "MANAGED_CACHING": ({}, [20, 25]),
        "MANAGED": ({"cache_load_factor": 0.1, "cache_sets": 1}, [40, 50]),
    }
    for location, (options, expected) in sizes.items():
        assert list(make_ours(case, device, location, **options).tables.cache_sizes.values()) == expected
    caching = make_ours(case, device, "MANAGED_CACHING", cache_sets=1)
    assert list(caching.tables.cache_sizes.values()) == [14, 18]  # these share the 32 rows of a set
    everything = make_ours(case, device, "MANAGED_CACHING", enforce_hbm=True)
    assert list(everything.tables.cache_sizes.values()) == [40, 50]
    free = type("Free", (), {"free_memory": staticmethod(lambda device: 90 * 32)})
    monkeypatch.setattr(placement, "backend_for", lambda device: free)
    small = make_ours(case, device, "MANAGED_CACHING", cache_load_factor=1.0, cache_reserved_memory=45 * 32.0)
    assert list(small.tables.cache_sizes.values()) == [20, 25]
    for reserved, expected in ((0.0, [40, 50]), (45 * 32.0, [20, 25]), (90 * 32.0, [1, 1])):
        managed = make_ours(case, device, "MANAGED", cache_reserved_memory=reserved)
        assert list(managed.tables.cache_sizes.values()) == expected
    with pytest.raises(ValueError, match=r"cache_reserved_memory is 2880\.0 bytes"):
        make_ours(case, device, "MANAGED_CACHING", cache_reserved_memory=90 * 32.0)
    with pytest.raises(ValueError, match="cache_load_factor is 0"):
        make_ours(case, device, "MANAGED_CACHING", cache_load_factor=0)


def test_managed_tables_take_every_batch_at_the_defaults(device: torch.device) -> None:
    """FBGEMM's default load factor of 0.2 does not apply to managed tables; a cached table in the same module
    keeps it.
    """
    kind = "CPU" if device.type == "cpu" else "CUDA"
    specs = [(1000, 8, "MANAGED", kind), (5, 4, "MANAGED", kind), (50, 4, "MANAGED_CACHING", kind)]
    module = SplitTableBatchedEmbeddingBagsCodegen(specs, device=device)
    ids = torch.cat([torch.arange(500), torch.tensor([0, 4, 7])])
    module(ids, torch.tensor([0, 500, 502, 503])).sum().backward()
    rows = module.split_embedding_weights()[0]
    assert (rows[:500] == -0.01).all()
    assert not rows[500:].any()
    assert list(module.tables.cache_sizes.values()) == [1000, 5, 10]


@pytest.mark.parametrize("algorithm", ["LRU", "LFU"])
def test_misses_are_counted(algorithm: str, device: torch.device) -> None:
    case = small_case()
    options = {"cache_algorithm": algorithm, "record_cache_metrics": (True, True), "gather_uvm_cache_stats": True}
    module = make_ours(case, device, "MANAGED_CACHING", **options)
    assert module.tables.options.cache_policy == algorithm.lower()
    offsets = torch.tensor([0, 2, 4, 6, 7])
    batches = [[1, 2, 2, 3, 5, 5, 5], [1, 2, 2, 3, 5, 5, 5], [1, 2, 2, 4, 5, 5, 6]]
    for number, ids in enumerate(batches):
        module(torch.tensor(ids), offsets)
        local = [1, 7, *[[4, 4], [4, 0], [5, 2]][number], 0, 0]
        assert module.get_table_wise_cache_miss().tolist() == [[3, 1], [3, 1], [4, 2]][number]
        assert module.get_cache_miss_counter().tolist() == [[1, 4], [1, 4], [2, 6]][number]
        assert module.get_uvm_cache_stats(use_local_cache=True).tolist() == local
    assert module.get_uvm_cache_stats().tolist() == [3, 21, 13, 6, 0, 0]
    module.print_uvm_cache_stats()
    module.reset_uvm_cache_stats()
    assert module.get_uvm_cache_stats().tolist() == [0] * 6
    assert module.get_cache_miss_counter().tolist() == [0, 0]
    silent = make_ours(case, device, "MANAGED_CACHING")
    silent(torch.tensor(batches[0]), offsets)
    assert silent.get_cache_miss_counter().tolist() == [0, 0]
    assert silent.get_table_wise_cache_miss().numel() == 0
    with pytest.raises(RuntimeError, match="gather_uvm_cache_stats=True"):
        silent.get_uvm_cache_stats()


def test_a_call_of_tables_of_several_dims_counts_once(device: torch.device) -> None:
    case = Case(7, "SUM", False, [4, 8, 4], [40, 50, 40], [0, 1, 2], torch.int64, torch.int64)
    module = make_ours(case, device, "MANAGED_CACHING", gather_uvm_cache_stats=True)
    for calls in (1, 2, 3):
        step(module, case)
        assert module.get_uvm_cache_stats()[0] == calls
        assert module.get_uvm_cache_stats(use_local_cache=True)[0] == 1


def test_resident_tables_miss_nothing(device: torch.device) -> None:
    case = small_case()
    module = make_ours(case, device, gather_uvm_cache_stats=True)
    step(module, case)
    assert module.get_uvm_cache_stats()[0] == 1
    assert module.get_uvm_cache_stats()[3] == 0


def test_flush_and_reset_do_not_change_rows(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    case = small_case()
    modules = [make_ours(case, device, "MANAGED_CACHING", cache_load_factor=0.5) for _ in "ab"]
    initial = case.weights()
    for module in modules:
        set_weights(module, initial)
    for _ in range(4):
        batch = case.batch()
        for module in modules:
            module(*batch).sum().backward()
        modules[0].flush()
        modules[0].reset_cache_states()
    assert "reset_cache_states has no effect" in caplog.text
    assert_same(*map(weights_of, modules))


# ---- state dicts


@pytest.mark.parametrize("to", ["resident", "MANAGED_CACHING"])
@LOCATION
@pytest.mark.parametrize("name", ["ADAM", "PARTIAL_ROWWISE_ADAM", "EXACT_SGD"])
def test_state_dicts_resume_training(name: str, location: str, to: str, device: torch.device) -> None:
    case = small_case()
    first, second = (
        torch.nn.ModuleDict({"tbe": make_ours(case, device, place, optimizer=name, **OPTIMIZERS[name][2])})
        for place in (location, to)
    )
    set_weights(first["tbe"], case.weights())
    for _ in range(3):
        step(first["tbe"], case)
    saved = first.state_dict()
    assert set(second.state_dict()) == set(saved)
    step(second["tbe"], case)
    second.load_state_dict(saved)
    batch = case.batch()
    for module in (first["tbe"], second["tbe"]):
        module(*batch).sum().backward()
    after = [module.state_dict() for module in (first, second)]
    for key, value in after[0].items():
        assert torch.equal(value, after[1][key]), key
    assert after[0]["tbe.states.iter"].item() == 4
    del saved["tbe.states.iter"]
    saved["tbe.other"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"(?s)Missing.*states\.iter.*Unexpected.*tbe\.other"):
        second.load_state_dict(saved)


def test_state_dicts_of_other_tables_are_refused(device: torch.device) -> None:
    case = small_case()
    module = make_ours(case, device, optimizer="EXACT_ADAGRAD")
    saved = module.state_dict()
    saved["states.t0.momentum1"] = torch.zeros(3, 8)
    with pytest.raises(RuntimeError, match="table 't0': shape"):
        module.load_state_dict(saved)
    step(module, case)
    before = module.state_dict()
    for key, value, message in (
        ("states.iter", torch.tensor([-3]), "iter: -3.0 is not a whole number"),
        ("states.iter", torch.tensor([1, 2]), r"iter: has shape \(2,\)"),
        ("states.t1.momentum1", before["states.t1.momentum1"].to_sparse(), r"t1\.momentum1 is torch\.sparse_coo"),
    ):
        with pytest.raises(RuntimeError, match=message):
            module.load_state_dict({**before, key: value})
        after = module.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())


@LOCATION
@pytest.mark.parametrize("optimizer", ["EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD"])
def test_fbgemms_state_dict_is_loaded(optimizer: str, location: str, device: torch.device) -> None:
    case = small_case()
    theirs, ours = make_fbgemms(case, optimizer=optimizer), make_ours(case, device, location, optimizer=optimizer)
    theirs.init_embedding_weights_uniform(-1, 1)
    step(theirs, case)
    ours.load_state_dict(theirs.state_dict())
    batch = case.batch()
    for module in (theirs, ours):
        module(*batch).sum().backward()
    torch.testing.assert_close(weights_of(ours), weights_of(theirs))
    for actual, expected in zip(states_of(ours), states_of(theirs), strict=True):
        torch.testing.assert_close(actual[0], expected[0])
    other = make_ours(random_case(2), device, optimizer=optimizer)
    with pytest.raises(RuntimeError, match="FBGEMM's weights"):
        other.load_state_dict(theirs.state_dict())


def test_fbgemms_state_dict_of_several_locations(device: torch.device) -> None:
    """The form in which FBGEMM saves on a GPU: tables in their own locations, row-wise states of all tables in
    GPU memory.
    """
    case = Case(7, "SUM", False, [8, 4, 8], [40, 50, 60], [0, 0, 1, 2], torch.int64, torch.int64)
    ours = make_ours(case, device, optimizer="PARTIAL_ROWWISE_ADAM")
    weights = case.weights()
    flat = [weight.flatten() for weight in weights]
    places = torch.tensor([0, 0, 2, 1], dtype=torch.int32)
    host, at = torch.empty(0), torch.tensor([0, 0, 0, 200])
    state = {"weights_dev": flat[0], "weights_host": host, "weights_uvm": torch.cat(flat[1:])}
    state |= {"weights_placements": places, "weights_offsets": at}
    state |= {"momentum1_dev": flat[0] + 1, "momentum1_host": host, "momentum1_uvm": torch.cat(flat[1:]) + 1}
    state |= {"momentum1_placements": places, "momentum1_offsets": at}
    state |= {"momentum2_dev": torch.arange(150.0), "momentum2_placements": torch.zeros(4, dtype=torch.int32)}
    state |= {"momentum2_offsets": torch.tensor([0, 0, 40, 90])}
    ours.load_state_dict(state | {"iter": torch.tensor([5]), "D_offsets": torch.tensor([0, 8, 16, 20, 28])})
    assert ours.iter.item() == 5
    assert_same(weights_of(ours), weights)
    rowwise = torch.arange(150.0).split(case.rows)
    assert_same(states_of(ours), [[weight + 1, second] for weight, second in zip(weights, rowwise, strict=True)])


def test_saver_saves_the_module(tmp_path: Path, device: torch.device) -> None:
    case = small_case()
    places = "resident", "MANAGED_CACHING"
    modules = [make_ours(case, device, place, optimizer="EXACT_ADAGRAD") for place in places]
    set_weights(modules[0], case.weights())
    modules[0].split_embedding_weights()[1][4].fill_(3)  # changes the weight through a view
    step(modules[0], case)
    Saver().save(modules[0], str(tmp_path / "save"))
    Saver().load(modules[1], str(tmp_path / "save"))
    assert_same(*map(weights_of, modules))
    assert_same(*map(states_of, modules))


def test_evaluation_reads_only(device: torch.device) -> None:
    case = small_case()
    module = make_ours(case, device, "MANAGED_CACHING")
    set_weights(module, case.weights())
    batch = case.batch()
    expected = module(*batch).detach()
    with torch.no_grad():
        assert torch.equal(module(*batch), expected)
    module.eval()
    assert not module(*batch).requires_grad


def test_names_and_sizes(device: torch.device) -> None:
    case = Case(0, "SUM", False, [8, 12], [40, 50], [0, 1, 1], torch.int64, torch.int64)
    module = make_ours(case, device, table_names=["a table", "a.table"])
    assert [table.name for table in module.tables.tables] == ["a_table", "a_table_1"]
    assert (module.dims, module.max_D, module.total_D) == ([8, 12], 12, 32)
    assert module.feature_table_map == [0, 1, 1]
    assert module.current_device == device or device.index is None
    assert module(*case.batch()).shape == (BAGS, 32)
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(module)
