"""Every option of FBGEMM's module is in the signature and the docs, and is honoured, ignored or refused as
documented.
"""

from __future__ import annotations

import inspect
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked_python
import numpy as np
import pytest
import torch
from fbgemm_cases import Case, make_both, training, weights_of

from rec_sdk_torch import fbgemm
from rec_sdk_torch.fbgemm import SplitTableBatchedEmbeddingBagsCodegen as Ours
from rec_sdk_torch.fbgemm import placement
from rec_sdk_torch.fbgemm.enums import member, sparse_type
from rec_sdk_torch.tbe import TableConfig, TableOptimizer

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "fbgemm.md"
SPECS = [(20, 8, "HOST", "CPU"), (30, 8, "MANAGED_CACHING", "CPU")]
ONE = SPECS[:1]


def _words(text: str) -> list[str]:
    return text.split()


METHODS = _words("""
split_embedding_weights split_optimizer_states get_optimizer_state init_embedding_weights_uniform
set_learning_rate get_learning_rate set_optimizer_step update_hyper_parameters flush reset_cache_states prefetch
get_cache_miss_counter get_table_wise_cache_miss get_uvm_cache_stats reset_uvm_cache_stats print_uvm_cache_stats
""")


def documented_options() -> dict[str, str]:
    """Returns the rest of the row for each name in the first column of the page's tables."""
    found = {}
    for line in PAGE.read_text().splitlines():
        cells = line.split("|")
        for name in re.findall(r"`(\w+)`", cells[1]) if line.startswith("|") else ():
            found[name] = "|".join(cells[2:])
    return found


def parameters(function: Any) -> dict[str, Any]:
    return {name: p.default for name, p in list(inspect.signature(function).parameters.items())[1:]}


@pytest.mark.parametrize("function", ["__init__", "forward", *METHODS])
def test_signatures_are_fbgemms(function: str) -> None:
    """Parameters' names, order and defaults match the installed FBGEMM, and the docs list each parameter."""
    ours = parameters(getattr(Ours, function))
    assert {function} & set(METHODS) | set(ours if function in ("__init__", "forward") else ()) <= set(
        documented_options()
    )
    theirs = parameters(getattr(training().SplitTableBatchedEmbeddingBagsCodegen, function))
    assert list(ours) == list(theirs)
    for name, default in theirs.items():
        same = getattr(default, "name", default) == getattr(ours[name], "name", ours[name])
        assert same, f"{name}: {ours[name]!r}, FBGEMM has {default!r}"


def test_public_methods_of_fbgemm_are_in_the_docs() -> None:
    module = training().SplitTableBatchedEmbeddingBagsCodegen
    own = {name for name, value in vars(module).items() if callable(value) and not name.startswith("_")}
    inner = {"forward", "log", "should_log", "get_table_name_for_logging"}
    assert own - inner <= set(documented_options())


def test_tests_named_in_the_docs_exist() -> None:
    defined = set(
        re.findall(r"^def (test_\w+)", "".join(p.read_text() for p in Path(__file__).parent.glob("*.py")), re.M)
    )
    named = re.findall(r"`(test_\w+)`", PAGE.read_text())
    assert named
    assert set(named) <= defined
    without = [
        name
        for name, answer in documented_options().items()
        if "not available" not in answer and "`test_" not in answer
    ]
    assert without == []


ENUMS = _words("""
OptimType SparseType EmbeddingLocation ComputeDevice PoolingMode BoundsCheckMode CacheAlgorithm WeightDecayMode
CounterWeightDecayMode StepMode LearningRateMode GradSumDecay
""")
DEFINITIONS = _words("""
TailIdThreshold CounterBasedRegularizationDefinition CowClipDefinition GlobalWeightDecayDefinition
UserEnabledConfigDefinition EnsembleModeDefinition EmainplaceModeDefinition
""")


@pytest.mark.parametrize("name", ENUMS)
def test_enums_have_fbgemms_names_and_values(name: str) -> None:
    theirs, ours = getattr(training(), name), getattr(fbgemm, name)
    assert {m.name: m.value for m in ours} == {m.name: m.value for m in theirs}
    for mode in theirs:
        assert member(ours, "it", mode) is ours[mode.name]
        assert member(ours, "it", mode.name.lower()) is ours[mode.name]


@pytest.mark.parametrize("name", DEFINITIONS)
def test_definitions_have_fbgemms_fields(name: str) -> None:
    theirs, ours = getattr(training(), name)(), getattr(fbgemm, name)()
    for key, value in vars(theirs).items():
        if key != "tail_id_threshold":
            assert getattr(vars(ours)[key], "name", vars(ours)[key]) == getattr(value, "name", value)
    assert vars(ours).keys() == vars(theirs).keys()


def test_values_that_name_no_member_are_refused() -> None:
    with pytest.raises(TypeError, match="optimizer is 3, expected a member of FBGEMM's OptimType, or its name"):
        Ours(SPECS, optimizer=3)
    with pytest.raises(ValueError, match="pooling_mode is 'no_such', allowed are"):
        Ours(SPECS, pooling_mode="no_such")
    assert sparse_type("it", torch.bfloat16) is fbgemm.SparseType.BF16
    with pytest.raises(ValueError, match=r"it is torch\.float64"):
        sparse_type("it", torch.float64)


def test_fbgemm_is_not_imported() -> None:
    code = (
        "import sys, torch, rec_sdk_torch.fbgemm as f; "
        f"module = f.SplitTableBatchedEmbeddingBagsCodegen({SPECS}, optimizer='LAMB'); "
        "module(torch.tensor([1, 2]), torch.tensor([0, 1, 2])); "
        "assert not {'fbgemm_gpu', 'torchrec'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_compat_has_the_same_names() -> None:
    pytest.importorskip("torchrec")
    code = (
        "from rec_sdk_torch import fbgemm; from rec_sdk_torch.compat import fbgemm as compat; "
        "assert all(getattr(compat, name) is getattr(fbgemm, name) for name in fbgemm.__all__)"
    )
    done = forked_python.python("-c", code, folder=ROOT)  # importing compat changes the process
    assert done.returncode == 0, done.stderr


EMAINPLACE = {"optimizer": "EMAINPLACE_ROWWISE_ADAGRAD"}
USER = fbgemm.UserEnabledConfigDefinition
COWCLIP = {"weight_decay_mode": "COWCLIP", "cowclip_regularization": fbgemm.CowClipDefinition()}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tbe_input_multiplexer_config": object()}, "before the forward"),
    ({"enable_raw_embedding_streaming": True}, "save deltas"),
    ({"is_qr_tbe": True}, "quotient-remainder"),
    ({"preallocated_host_buffers": {"weights_host": None}}, "preallocated_host_buffers"),
    ({"extra_optimizer_config": USER(use_rowwise_bias_correction=True)}, "use_rowwise_bias_correction=True"),
    ({"extra_optimizer_config": USER(use_writeback_bwd_prehook=True)}, "use_writeback_bwd_prehook=True"),
    ({**EMAINPLACE, **COWCLIP}, "COWCLIP is only supported by EXACT_ROWWISE_ADAGRAD"),
    *(({"optimizer": name}, f"optimizer {name}: ") for name in ("SGD", "ROWWISE_ADAGRAD", "MADGRAD")),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED)
def test_refused_options(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        Ours(SPECS, **options)


def test_precisions_without_a_table() -> None:
    for option in ("weights_precision", "output_dtype"):
        with pytest.raises(ValueError, match="INT8 has no table here"):
            Ours(SPECS, **{option: "INT8"})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"embedding_specs": []}, "embedding_specs is empty"),
        ({"embedding_specs": [(20, 8, "HOST")]}, r"embedding_specs\[0\] is"),
        ({"embedding_specs": [(20, 8, "MTIA", "MTIA")]}, "MTIA is a device"),
        ({"embedding_specs": [(20, 8, "HOST", "CUDA")]}, "HOST is the memory of ComputeDevice.CPU"),
        ({"embedding_specs": [*ONE, (20, 8, "DEVICE", "CUDA")], "device": "cpu"}, "all tables need one compute device"),
        ({"embedding_specs": [*ONE, (20, 4, "HOST", "CPU")], "pooling_mode": "NONE"}, "rows of one dim"),
        ({"feature_table_map": [0, 0]}, "each of the 2 tables needs a feature"),
        ({"feature_table_map": [0, 1, 2]}, "no other has one"),
        ({"table_names": ["one"]}, "table_names has 1 names for 2 tables"),
        ({"embedding_table_index_type": torch.int16}, "embedding_table_index_type is torch.int16"),
        ({"embedding_table_offset_type": torch.float32}, "embedding_table_offset_type is torch.float32"),
        ({"optimizer": "EXACT_ROWWISE_ADAGRAD", "weight_decay_mode": "COWCLIP"}, "cowclip_regularization is None"),
        ({"learning_rate": float("nan")}, "lr is nan"),
        ({"optimizer_state_dtypes": {"momentum1": "FP16"}}, "EXACT_SGD has no state momentum1, it has none"),
        ({"optimizer_state_dtypes": {"momentum1": "INT8"}}, "INT8 has no table here"),
        ({**EMAINPLACE, "embedding_specs": [(20, 7, "HOST", "CPU")]}, r"tables have odd dims \[7\]"),
        ({**EMAINPLACE, "emainplace_mode": fbgemm.EmainplaceModeDefinition(step_ema=0)}, "step_ema must be at least 1"),
        (
            {
                "optimizer": "ENSEMBLE_ROWWISE_ADAGRAD",
                "ensemble_mode": fbgemm.EnsembleModeDefinition(step_swap=0),
            },
            "step_swap is 0, must be at least 1",
        ),
    ],
)
def test_invalid_specs_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Ours(**{"embedding_specs": SPECS, **options})


LOGGED: list[tuple[dict[str, Any], str]] = [
    (
        {"weights_precision": "FP16", "cache_precision": "FP32"},
        "stochastic_rounding=True has no effect on cached tables: FP32 weights in the cache are not rounded",
    ),
    ({"uvm_non_rowwise_momentum": True}, "uvm_non_rowwise_momentum=True has no effect"),
    ({"use_experimental_tbe": True}, "use_experimental_tbe=True has no effect"),
    ({"multipass_prefetch_config": fbgemm.MultiPassPrefetchConfig()}, "multipass_prefetch_config"),
    ({"uvm_host_mapped": True}, "uvm_host_mapped=True has no effect"),
    ({"embedding_shard_info": [(20, 8, 0, 0), (30, 8, 0, 0)]}, "embedding_shard_info"),
    ({"res_params": object()}, "res_params"),
    ({"stats_reporter_config": object()}, "read cache_stats() and memory_report()"),
    ({"ensemble_mode": fbgemm.EnsembleModeDefinition()}, "EXACT_SGD does not use it"),
    ({"emainplace_mode": fbgemm.EmainplaceModeDefinition()}, "EXACT_SGD does not use it"),
    ({"max_gradient": 2.0}, "max_gradient=2.0 has no effect"),
    ({"max_norm": 2.0, "optimizer": "ADAM"}, "max_norm=2.0 has no effect: ADAM does not use it"),
    ({"weight_decay": 0.1}, "weight_decay=0.1 has no effect: EXACT_SGD does not use it"),
    ({"weight_decay_mode": "L2", "optimizer": "LAMB"}, "weight_decay_mode='L2' has no effect"),
    ({"eta": 0.1}, "eta=0.1 has no effect"),
    ({"beta1": 0.1, "optimizer": "EXACT_ADAGRAD"}, "beta1=0.1 has no effect"),
    ({"momentum": 0.1}, "momentum=0.1 has no effect"),
    ({"embedding_specs": [(20, 8, "MANAGED", "CPU")]}, "EmbeddingLocation.MANAGED of 1 tables"),
]


@pytest.mark.parametrize(("options", "line"), LOGGED)
def test_logged_options(options: dict[str, Any], line: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rec_sdk_torch.fbgemm"):
        Ours(**{"embedding_specs": SPECS, **options})
    assert [line in record.getMessage() for record in caplog.records] == [True]


def test_defaults_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    for optimizer in ("EXACT_SGD", "EXACT_ROWWISE_ADAGRAD", "ADAM", "LARS_SGD"):
        Ours(SPECS, optimizer=optimizer)
    modes = training().WeightDecayMode
    decay = {"weight_decay": 0.1, "weight_decay_mode": modes.L2}
    Ours(SPECS, optimizer="EXACT_ROWWISE_ADAGRAD", max_norm=1.0, eps=1e-3, **decay)
    Ours(SPECS, weight_decay_mode=modes.NONE, prefetch_pipeline=True, preallocated_host_buffers={})
    assert caplog.records == []


def test_arguments_of_the_forward(caplog: pytest.LogCaptureFixture) -> None:
    module = Ours(SPECS)
    batch = torch.tensor([1, 2]), torch.tensor([0, 1, 2])
    for _ in range(2):
        module(*batch, total_unique_indices=2)
    assert [record.getMessage()[:36] for record in caplog.records] == ["total_unique_indices has no effect: "[:36]]
    for name in ("hash_zch_identities", "hash_zch_runtime_meta"):
        with pytest.raises(NotImplementedError, match=f"{name} is not supported: "):
            module(*batch, **{name: torch.zeros(1)})
    with pytest.raises(ValueError, match="per-sample weights need pooled tables"):
        Ours(SPECS, pooling_mode="NONE")(*batch, torch.ones(2))
    with pytest.raises(ValueError, match="needs a pooling_mode other than NONE"):
        Ours(SPECS, pooling_mode="NONE")(*batch, batch_size_per_feature_per_rank=[[1], [1]])
    with pytest.raises(ValueError, match=r"has 1 features with .* ranks, expected 2 features"):
        module(*batch, batch_size_per_feature_per_rank=[[1]])
    with pytest.raises(ValueError, match=r"offsets has 3 entries, expected 3 \+ 1"):
        module(*batch, batch_size_per_feature_per_rank=[[1], [2]])


def test_managed_tables_use_memory_left_by_cached_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is memory for 100 records of 16 bytes: 20 rows are resident, 20 of 40 rows are cached, which leaves 60
    records for managed tables. All tables together have 120 rows.
    """

    class Backend:
        def free_memory(self, device: torch.device) -> int:
            return 100 * 16

    monkeypatch.setattr(placement, "backend_for", lambda device: Backend())
    kinds = [("DEVICE", 20), ("MANAGED_CACHING", 40), ("MANAGED", 120)]
    specs, _ = placement.parse_specs([(rows, 4, kind, "CUDA") for kind, rows in kinds], False)
    configs = [TableConfig(kind, rows, 4, hashed=False) for kind, rows in kinds]
    optimizer = TableOptimizer.create(torch.optim.SGD, {"lr": 0.1})
    sizes = placement.cache_option(specs, configs, optimizer, torch.device("cpu"), 0.5, 0, 0)
    assert sizes == {"DEVICE": 20, "MANAGED_CACHING": 20, "MANAGED": 60}


def test_names_that_become_the_same_are_numbered() -> None:
    assert placement.derive_table_names(["a b", "a-b", "a.b", "a_b_1"], 4) == ["a_b", "a_b_1", "a_b_2", "a_b_1_1"]


# ---- return values and attributes, compared with FBGEMM's


@pytest.mark.parametrize("kind", [int, np.int64, np.int32])
def test_locations_are_numbers_too(kind: type) -> None:
    module = Ours([(20, 8, kind(3), kind(0))], pooling_mode=kind(1), bounds_check_mode=kind(2))
    assert module.pooling_mode is fbgemm.PoolingMode.MEAN
    assert module.bounds_check_mode is fbgemm.BoundsCheckMode.IGNORE
    assert module(torch.tensor([1]), torch.tensor([0, 1])).shape == (1, 8)
    with pytest.raises(ValueError, match=r"the location of embedding_specs\[0\] is 7, allowed are \[0, 1, 2, 3, 4\]"):
        Ours([(20, 8, kind(7), kind(0))])
    with pytest.raises(TypeError, match=r"optimizer is .*3.*, expected a member"):
        Ours(ONE, optimizer=kind(3))


def test_optimizers_equal_fbgemms() -> None:
    kind = training().OptimType
    for each in kind:
        same = fbgemm.OptimType[each.name]
        assert same == each
        assert each == same
        assert hash(same) == hash(each)
        assert {same: 1}[each] == 1
        others = [other for other in kind if other is not each]
        assert all(same != other and other != same for other in others)
    module = Ours(ONE, optimizer=kind.ADAM)
    assert module.optimizer == kind.ADAM
    assert module.optimizer in (kind.LAMB, kind.ADAM)
    assert module.optimizer != "ADAM"


@pytest.mark.parametrize("name", ["lr", "eps", "beta1", "beta2", "weight_decay", "lower_bound"])
@pytest.mark.parametrize("optimizer", ["EXACT_SGD", "EXACT_ADAGRAD", "ADAM", "EXACT_ROWWISE_ADAGRAD"])
def test_hyper_parameters_that_an_optimizer_lacks(optimizer: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """FBGEMM accepts all hyperparameters, but its kernels read only the optimizer's own.

    Here the log names the others.
    """
    module = Ours(ONE, optimizer=optimizer)
    before = dict(module._optimizer.options)
    module.update_hyper_parameters({name: 0.25})
    changed = module._optimizer.options != before
    lines = [record.getMessage() for record in caplog.records]
    assert changed or lines == [f"{name}=0.25 has no effect: {optimizer} with this mode does not use it"]
    assert not (changed and lines)
    now = dict(module._optimizer.options)
    with pytest.raises(NotImplementedError, match="other"):
        module.update_hyper_parameters({name: 0.5, "other": 1.0})
    assert module._optimizer.options == now


def test_none_has_no_states() -> None:
    module = Ours(ONE, optimizer="NONE")
    for call in (
        module.split_optimizer_states,
        module.get_optimizer_state,
        lambda: module.update_hyper_parameters({"eps": 1.0}),
        lambda: module.set_learning_rate(1.0),
    ):
        with pytest.raises(NotImplementedError, match="NONE has"):
            call()


def test_adagradw_has_iter() -> None:
    definition = fbgemm.CounterBasedRegularizationDefinition
    options = {"optimizer": "EXACT_ROWWISE_ADAGRAD", "weight_decay_mode": "COUNTER", "weight_decay": 0.1}
    for mode, extra in (("ADAGRADW", ["iter"]), ("DECOUPLE", [])):
        counted = definition(counter_weight_decay_mode=fbgemm.CounterWeightDecayMode[mode])
        (states,) = Ours(ONE, counter_based_regularization=counted, **options).get_optimizer_state()
        assert list(states) == ["sum", "prev_iter", "row_counter", *extra]


def test_mean_with_weights_divides_the_gradient_too(device: torch.device) -> None:
    """FBGEMM's CPU module divides only the output, as the docs state."""
    case = Case(0, "MEAN", False, [8], [20], [0], torch.int64, torch.int64)
    theirs, ours = make_both(case, device, learning_rate=1.0)
    before = weights_of(theirs)[0].clone()
    for module in (theirs, ours):
        module(torch.tensor([1, 2]), torch.tensor([0, 2]), torch.tensor([1.0, 3.0])).sum().backward()
    for module, steps in ((ours, [0.5, 1.5]), (theirs, [1.0, 3.0])):
        moved = (before - weights_of(module)[0])[1:3, 0]
        torch.testing.assert_close(moved, torch.tensor(steps))


def test_an_output_in_the_callers_memory(device: torch.device) -> None:
    """Rows and updates are the same as without the option. Outputs are written at each rank's and feature's offset;
    other memory is unchanged.
    """
    on = ("HOST", "CPU") if device.type == "cpu" else ("DEVICE", "CUDA")
    specs = [(20, 4, *on), (20, 8, *on)]
    plain, written = (Ours(specs, device=device) for _ in "ab")
    for module in (plain, written):
        for table in module.split_embedding_weights():
            table.copy_(torch.arange(table.numel()).reshape(table.shape))
    batch, sizes = (torch.arange(5), torch.arange(6)), [[1, 2], [2, 0]]
    memory = torch.full((40,), -1.0, device=device)
    offsets = torch.tensor([[30, 2], [20, 0]])  # rank 0 has 4 and 16 elements, rank 1 has 8 and none
    for _ in range(2):
        expected = plain(*batch, batch_size_per_feature_per_rank=sizes)
        out = written(*batch, batch_size_per_feature_per_rank=sizes, vbe_output=memory, vbe_output_offsets=offsets)
        assert out.data_ptr() == memory.data_ptr()
        first, second, third = expected.detach().split([4, 16, 8])
        for begin, part in ((30, first), (2, second), (20, third)):
            assert torch.equal(out.detach()[begin : begin + len(part)], part)
        assert (out.detach() == -1).sum() == 40 - 28
        weights = torch.arange(28.0, device=device)
        (expected * weights).sum().backward()
        (torch.cat([out[30:34], out[2:18], out[20:28]]) * weights).sum().backward()
        torch.testing.assert_close(weights_of(plain), weights_of(written), rtol=0, atol=0)
    with pytest.raises(ValueError, match="go together"):
        written(*batch, vbe_output=memory)
    with pytest.raises(ValueError, match=r"expected offsets of shape \(2, 2\)"):
        written(*batch, batch_size_per_feature_per_rank=sizes, vbe_output=memory[:33], vbe_output_offsets=offsets)
