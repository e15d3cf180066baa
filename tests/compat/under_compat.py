"""Tests that test_compat.py runs in a separate process started with `python -m rec_sdk_torch.compat`."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrec
from option_cases import OPTIONS, expected, make_collection, observed
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed.planner import Topology
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward as torchrec_apply
from training import output_parts

import rec_sdk_torch as rst
from rec_sdk_torch.distributed.torchrec_sharders import TorchRecBagCollectionSharder, TorchRecCollectionSharder
from rec_sdk_torch.modules.defaults import config_defaults, use_rec_sdk_defaults
from rec_sdk_torch.tbe.step.prefetch_queue import MAX_DEPTH

CONFIGS = "EmbCacheEmbeddingConfig EmbCacheEmbeddingBagConfig AdmitAndEvictConfig InitializerType"
COLLECTIONS = "EmbCacheEmbeddingCollection EmbCacheEmbeddingBagCollection"
NAMES = {
    "torchrec_embcache.distributed": f"{CONFIGS} {COLLECTIONS} EmbCacheTrainPipelineSparseDist",
    "torchrec_embcache.distributed.configs": f"{CONFIGS} ShowClickParams AdmitAndEvictPolicyType",
    "torchrec_embcache.distributed.embedding": "EmbCacheEmbeddingCollection EmbCacheEmbeddingConfig",
    "torchrec_embcache.distributed.embedding_bag": "EmbCacheEmbeddingBagCollection EmbCacheEmbeddingBagConfig",
    "torchrec_embcache.distributed.sharding.embedding_sharder": (
        "EmbCacheEmbeddingCollectionSharder EmbCacheEmbeddingBagCollectionSharder"
    ),
    "torchrec_embcache.distributed.train_pipeline": "EmbCacheTrainPipelineSparseDist",
    "torchrec_embcache.sparse.jagged_tensor_with_timestamp": (
        "JaggedTensorWithTimestamp KeyedJaggedTensorWithTimestamp"
    ),
    "torchrec_embcache.saver": "Saver",
    "hybrid_torchrec.saver": "Saver",
    "hybrid_torchrec": "HashEmbeddingBagCollection HashEmbeddingBagConfig",
    "hybrid_torchrec.distributed": "HybridTrainPipelineSparseDist get_default_hybrid_sharders",
    "hybrid_torchrec.distributed.sharding_plan": "get_default_hybrid_sharders",
    "hybrid_torchrec.distributed.hybrid_train_pipeline": "HybridTrainPipelineSparseDist",
}


@pytest.mark.parametrize("module", NAMES)
def test_names_refer_to_the_package(module: str) -> None:
    found = importlib.import_module(module)
    for name in NAMES[module].split():
        assert getattr(found, name) is getattr(rst, name)
        assert name in dir(found)


class RecSdk:
    """Namespace of the classes that Rec SDK's scripts import, by name."""

    def __getattr__(self, name: str) -> Any:
        package = "hybrid_torchrec" if name.startswith("Hash") else "torchrec_embcache.distributed"
        return getattr(importlib.import_module(package), name)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_collections(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    collection = make_collection(name, RecSdk())
    wanted = name == "TableConfig.hashed" or expected(OPTIONS[name], OPTIONS[name].collection)
    assert observed(name, collection.embedding) == wanted  # TorchRec's own configs make hash tables


SHARDER = "cpu_device cpu_env npu_device npu_env fused_params=None qcomm_codecs_registry=None"
CACHED = "torchrec_embcache.distributed"
SHARDERS, CONFIG = f"{CACHED}.sharding.embedding_sharder", f"{CACHED}.configs"
TRAIN = f"{CACHED}.train_pipeline:EmbCacheTrainPipelineSparseDist"
HYBRID = "hybrid_torchrec.distributed.hybrid_train_pipeline:HybridTrainPipelineSparseDist"
JAGGED, SAVER = "torchrec_embcache.sparse.jagged_tensor_with_timestamp", "torchrec_embcache.saver:Saver"
TABLES = "tables world_size batch_size multi_hot_sizes {}=False need_accumulate_offset=True device=None {}_cls"
CALLS = {
    f"{SHARDERS}:EmbCacheEmbeddingCollectionSharder": SHARDER,
    f"{SHARDERS}:EmbCacheEmbeddingBagCollectionSharder": SHARDER,
    TRAIN: (
        "model optimizer cpu_device npu_device return_loss=False evict_step_interval=None execute_all_batches=True "
        "apply_jit=False context_type pipeline_postproc=False custom_model_fwd=None custom_model_zero_grad=None "
        "custom_model_bwd=None"
    ),
    f"{TRAIN}.progress": "self dataloader_iter",
    f"{TRAIN}.wait_pipeline_compute_swapinfo": "self",
    HYBRID: "model optimizer device execute_all_batches=True apply_jit=False return_loss=False pipe_n_batch=6",
    f"{HYBRID}.progress": "self dataloader_iter",
    "hybrid_torchrec:HashEmbeddingBagCollection": "tables is_weighted=False device=None",
    f"{CACHED}:EmbCacheEmbeddingCollection": TABLES.format("need_indices", "embedding_optimizer"),
    f"{CACHED}:EmbCacheEmbeddingBagCollection": TABLES.format("is_weighted", "embedding_optimizer"),
    f"{CONFIG}:AdmitAndEvictConfig": (
        "admit_threshold=-1 not_admitted_default_value=0.0 evict_threshold=0 evict_step_interval=0 "
        "showclick_params policy_type"
    ),
    f"{CONFIG}:ShowClickParams": "alpha=1 beta=0 admit_threshold=0 evict_percentage=0 score_decay=1",
    f"{JAGGED}:JaggedTensorWithTimestamp.__init__": (
        "self values weights=None lengths=None offsets=None timestamps=None"
    ),
    f"{JAGGED}:KeyedJaggedTensorWithTimestamp.__init__": (
        "self keys values timestamps=None weights=None lengths=None offsets=None"
    ),
    f"{JAGGED}:KeyedJaggedTensorWithTimestamp.from_jt_dict": "jt_dict",
    "hybrid_torchrec.distributed.sharding_plan:get_default_hybrid_sharders": "host_env",
    SAVER: "rank=None",
    f"{SAVER}.save": "self module path incremental=False",
    f"{SAVER}.load": "self module path incremental=False",
    f"{SAVER}.get_latest_load_path": "path",
    f"{SAVER}.is_timestamp_format": "dir_name",
}
"""The parameters that scripts rely on, in order, with Rec SDK's defaults."""


@pytest.mark.parametrize("call", CALLS)
def test_arguments_match_rec_sdk(call: str) -> None:
    module, _, path = call.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    parameters = list(inspect.signature(found).parameters.values())
    expected = [argument.partition("=") for argument in CALLS[call].split()]
    names = [parameter.name for parameter in parameters]
    assert names[: len(expected)] == [name for name, _, _ in expected]
    for parameter, (name, given, default) in zip(parameters, expected, strict=False):
        assert not given or repr(parameter.default) == default, name
    beyond = parameters[len(expected) :]
    assert all(
        each.default is not each.empty or each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) for each in beyond
    )


@pytest.mark.parametrize("config", [rst.EmbCacheEmbeddingConfig, rst.EmbCacheEmbeddingBagConfig])
def test_fields_of_configs_come_after_torchrecs_fields(config: Any) -> None:
    parameters = inspect.signature(config).parameters
    base = list(inspect.signature(config.__mro__[2]).parameters)
    further = ["weight_init_mean", "weight_init_stddev", "initializer_type", "admit_and_evict_config", "is_incremental"]
    assert list(parameters) == [*base, *further]
    assert [parameters[name].default for name in further[:3]] == [0.0, 0.05, None]


def test_constants() -> None:
    """The constants exist with Rec SDK's values; only the limits on path lengths and names of saves apply here."""
    constants = importlib.import_module("hybrid_torchrec.constants")
    limits = (1_000_000_000, 4096, 8, 10_000, 102_400, 10_000, 102_400, 2**36, 24)
    assert [getattr(constants, name) for name in constants.__all__] == list(limits)
    hybrid = importlib.import_module("hybrid_torchrec.distributed.hybrid_train_pipeline")
    assert hybrid.MAX_PIPE_N_BATCH == MAX_DEPTH == 12
    assert importlib.import_module("torchrec_embcache.distributed.train_pipeline").MIN_EVICT_STEP_INTERVAL == 10
    for package in ("torchrec_embcache", "hybrid_torchrec"):
        saver = importlib.import_module(f"{package}.saver")
        assert saver.SAVE_PATH_MAX_LEN == 1024
        name = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC).strftime(saver.TIMESTAMP_FORMAT)
        assert name == "20260102030405"
        assert rst.Saver.is_timestamp_format(name)
        paths = importlib.import_module(f"{package}.utils")
        paths.check_path("/" + "x" * 1023)
        with pytest.raises(ValueError, match="1 to 1024"):
            paths.check_path("/" + "x" * 1024)


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("1.5.0", (1, 5, 0)),
        ("1.5.0rc1", (1, 5, 0)),
        ("1.5.0+cpu", (1, 5, 0)),
        ("1.8.0.dev20261126+cu130", (1, 8, 0)),
        ("2026.11.26", (2026, 11, 26)),
        ("1.5rc2.dev7", (1, 5, 0)),
        ("nightly", (0, 0, 0)),
    ],
)
def test_versions(monkeypatch: pytest.MonkeyPatch, version: str, release: tuple[int, int, int]) -> None:
    constants = importlib.import_module("rec_sdk_torch.compat.constants")
    assert constants.release("no-package-has-this-name") == (0, 0, 0)
    assert constants.release("torchrec") == constants.TORCH_REC_VERSION != (0, 0, 0)
    monkeypatch.setattr(importlib.metadata, "version", {"torchrec": version}.__getitem__)
    assert constants.release("torchrec") == release


def test_remaining_names() -> None:
    from hybrid_torchrec import IS_TORCH_REC_120, IS_TORCH_REC_150
    from hybrid_torchrec.utils import safe_makedirs
    from torchrec.optim import AccumulateAdagrad
    from torchrec_embcache.utils import check_path
    from torchrec_embcache.utils import safe_makedirs as other

    assert safe_makedirs is other
    assert [torchrec.__version__.startswith(version) for version in ("1.2.0", "1.5.0")] == [
        IS_TORCH_REC_120,
        IS_TORCH_REC_150,
    ]
    assert check_path.__module__ == "rec_sdk_torch.compat.paths"
    assert AccumulateAdagrad is rst.AccumulateAdagrad
    with pytest.raises(ImportError, match=r"hybrid_torchrec\.distributed\.nothing"):
        importlib.import_module("hybrid_torchrec.distributed.nothing")
    assert importlib.util.find_spec("hybrid_torchrec.nothing") is None
    import hybrid_torchrec

    with pytest.raises(AttributeError, match=r"'hybrid_torchrec' .* no 'Hash'; it has HashEmbeddingBagCollection"):
        hybrid_torchrec.Hash  # noqa: B018


def inner_parts() -> list[tuple[str, list[str]]]:
    """Lists the modules that docs/porting.md calls inner parts, each with the names listed there."""
    page = (Path(__file__).parents[2] / "docs" / "porting.md").read_text()
    table = page.partition("### Inner parts")[2].partition("###")[0]
    firsts = [row.split(" | ")[0] for row in table.splitlines() if row.startswith("| `")]
    parts = [part for first in firsts for part in re.split(r"; |, (?=`\w+\.)", first)]
    return [(module, names) for part in parts for module, *names in [re.findall(r"`([\w.]+)`", part)]]


@pytest.mark.parametrize(("module", "names"), inner_parts())
def test_inner_parts_are_missing_with_an_explanation(module: str, names: list[str]) -> None:
    assert module.startswith(("hybrid_torchrec.", "torchrec_embcache."))
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError:
        return
    assert names, "the whole module is listed, and is there"
    assert not [name for name in names if hasattr(found, name)]


def test_inner_parts_are_listed() -> None:
    listed = dict(inner_parts())
    assert len(listed) == 19
    assert "IdsMapper" in listed["hybrid_torchrec.modules.ids_process"]
    from torchrec.modules.embedding_modules import process_pooled_embeddings, reorder_inverse_indices

    assert callable(process_pooled_embeddings)
    assert callable(reorder_inverse_indices)


def test_a_pipeline_takes_the_context_of_rec_sdk() -> None:
    from torchrec_embcache.distributed.train_pipeline import (
        EmbCacheTrainPipelineContext,
        EmbCacheTrainPipelineSparseDist,
    )

    model = rst.EmbCacheEmbeddingBagCollection([config_of(rst.EmbCacheEmbeddingBagConfig)], cache=8)
    arguments = model, torch.optim.SGD([torch.zeros(1)]), "cpu", "cpu"
    EmbCacheTrainPipelineSparseDist(*arguments, context_type=EmbCacheTrainPipelineContext)
    with pytest.raises(ValueError, match="makes no contexts, leave it None or Rec SDK's default"):
        EmbCacheTrainPipelineSparseDist(*arguments, context_type=dict)


def test_bags_are_pooled() -> None:
    config = config_of(rst.EmbCacheEmbeddingBagConfig, pooling=PoolingType.NONE)
    with pytest.raises(ValueError, match=r"pooling PoolingType\.NONE, allowed are SUM and MEAN"):
        rst.EmbCacheEmbeddingBagCollection([config])


def test_a_topology_of_npus_has_device_memory() -> None:
    cap = 2**30
    npus = Topology(world_size=2, compute_device="npu", hbm_cap=cap)
    assert [device.storage.hbm for device in npus.devices] == [cap, cap]
    assert [device.storage.hbm for device in Topology(2, "npu", cap).devices] == [cap, cap]
    assert Topology(2, "cpu", hbm_cap=cap).devices[0].storage.hbm == 0
    with pytest.raises(AssertionError, match="unsupported compute device tpu"):
        Topology(2, "tpu")


def test_the_library_of_operators_need_not_be_there(tmp_path: Path) -> None:
    torch.ops.load_library("libfbgemm_npu_api.so")
    torch.ops.load_library(str(tmp_path / "libfbgemm_npu_api.so"))
    with pytest.raises(OSError, match=r"libother\.so"):
        torch.ops.load_library("libother.so")
    damaged = tmp_path / "libfbgemm_npu_api.so"
    damaged.write_text("no library")
    with pytest.raises(OSError, match=r"libfbgemm_npu_api\.so"):
        torch.ops.load_library(str(damaged))


def sequence() -> rst.EmbCacheEmbeddingCollection:
    fields = {"num_embeddings": 100, "embedding_dim": 5, "weight_init_min": 0.0, "weight_init_max": 1.0}
    return rst.EmbCacheEmbeddingCollection([config_of(rst.EmbCacheEmbeddingConfig, **fields)], 1, 4, [1])


def train(tables: rst.EmbCacheEmbeddingCollection) -> torch.Tensor:
    """Runs one training step on a single id, with a gradient so small that eps matters; returns the row."""
    batch = KeyedJaggedTensor(["f"], torch.tensor([3]), lengths=torch.tensor([1]))
    (tables(batch)["f"].values().sum() * 1e-8).backward()
    return tables.state_dict()["embeddings.t.weight"][0]


@pytest.mark.parametrize("apply", [rst.apply_optimizer_in_backward, torchrec_apply])
@pytest.mark.parametrize(("given", "eps"), [({}, 1e-8), ({"eps": 1e-10}, 1e-10)])
def test_rows_are_linear_and_adagrad_has_an_eps_of_its_own(apply: Any, given: dict[str, float], eps: float) -> None:
    tables = sequence()
    apply(torch.optim.Adagrad, tables.parameters(), {"lr": 0.02, **given})
    weights = torch.nn.Parameter(torch.linspace(0, 1, 5))
    weights.grad = torch.full((5,), 1e-8)
    torch.optim.Adagrad([weights], lr=0.02, eps=eps).step()
    torch.testing.assert_close(train(tables), weights.detach(), rtol=1e-6, atol=1e-7)
    assert tables.fused_optimizer.param_groups[0]["eps"] == eps


def test_other_optimizers_keep_their_defaults() -> None:
    for optimizer, eps in ((torch.optim.SGD, None), (rst.AccumulateAdagrad, 1e-8)):
        tables = sequence()
        rst.apply_optimizer_in_backward(optimizer, tables.parameters(), {"lr": 0.02})
        assert tables.fused_optimizer.param_groups[0].get("eps") == eps


FAR = torch.tensor([-5, 0, 7, 10**12])
"""Ids, only one of which is inside an index table of 4 rows."""


def first_rows(tables: Any) -> torch.Tensor:
    return torch.cat(output_parts(tables(KeyedJaggedTensor(["f"], FAR, lengths=torch.ones(4, dtype=torch.int64)))))


@torch.no_grad()
def rows_of(tables: Any) -> torch.Tensor:
    return first_rows(tables)


def config_of(kind: Any, **fields: Any) -> Any:
    return kind(**{"name": "t", "num_embeddings": 4, "embedding_dim": 8, "feature_names": ["f"], **fields})


EACH = (
    (rst.EmbCacheEmbeddingCollection, EmbeddingConfig, rst.EmbCacheEmbeddingConfig),
    (rst.EmbCacheEmbeddingBagCollection, EmbeddingBagConfig, rst.EmbCacheEmbeddingBagConfig),
)


@pytest.mark.parametrize("case", [*EACH, (rst.HashEmbeddingBagCollection, EmbeddingBagConfig, None)])
def test_configs_of_torchrec_make_hash_tables(case: Any) -> None:
    collection, plain, _ = case
    tables = collection([config_of(plain)])
    rst.apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 1.0})
    before = first_rows(tables)
    (before * torch.arange(1.0, 5.0)[:, None]).sum().backward()
    expected = before.detach() - torch.arange(1.0, 5.0)[:, None]
    torch.testing.assert_close(first_rows(tables).detach(), expected)
    assert [name.endswith("t.ids") for name in tables.state_dict()].count(True) == 1


@pytest.mark.parametrize(
    ("sharder", "module", "config"),
    [
        (TorchRecBagCollectionSharder, EmbeddingBagCollection, EmbeddingBagConfig),
        (TorchRecCollectionSharder, EmbeddingCollection, EmbeddingConfig),
    ],
)
def test_collections_of_torchrec_keep_index_tables(sharder: Any, module: Any, config: Any) -> None:
    made = sharder()._make_collection(module(tables=[config_of(config)]), torch.device("cpu"))
    table = made.embedding.tables[0]
    assert (table.hashed, table.init_range) == (False, (-0.5, 0.5))
    assert table.initializer_type is rst.InitializerType.UNIFORM


def test_configs_of_torchrec_are_tracked_beside_those_that_are() -> None:
    tracked = config_of(rst.EmbCacheEmbeddingConfig, name="other", feature_names=["g"], is_incremental=True)
    tables = rst.EmbCacheEmbeddingCollection([config_of(EmbeddingConfig), tracked])
    assert [table.track_changes for table in tables.embedding.tables] == [True, True]


@pytest.mark.parametrize("collection", EACH)
def test_initial_weights_of_cached_tables_go_from_0_to_1(collection: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The initializer LINEAR is Rec SDK's default: for its scripts nothing has changed, and there is no warning."""
    make, plain, config = collection
    linear = torch.linspace(0, 1, 8).expand(4, 8)
    monkeypatch.setattr(config_defaults, "warns_changed_default", True)  # as in a new process
    use_rec_sdk_defaults()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(rows_of(make([config_of(plain)])), linear)
        torch.testing.assert_close(rows_of(make([config_of(config)])), linear)
    torch.testing.assert_close(rows_of(make([config_of(config, weight_init_min=-1.0)])), linear * 2 - 1)
    for kind in (rst.InitializerType.UNIFORM, rst.InitializerType.TRUNCATED_NORMAL):
        table = make([config_of(config, initializer_type=kind)]).embedding.tables[0]
        assert table.init_range == (0.0, 1.0)
        rows = rows_of(make([config_of(config, initializer_type=kind)]))
        assert 0 <= rows.min() < rows.max() <= 1
        assert rows.unique().numel() == 32
    ones = config_of(config, init_fn=torch.nn.init.ones_)
    assert torch.equal(rows_of(make([ones])), torch.ones(4, 8))


@pytest.mark.parametrize("kind", [rst.HashEmbeddingBagConfig, EmbeddingBagConfig])
def test_initial_weights_of_hash_tables_match_torchrec(kind: Any) -> None:
    tables = rst.HashEmbeddingBagCollection([config_of(kind)])
    assert tables.embedding.tables[0].init_range == (-0.5, 0.5)
    rows = rows_of(tables)
    assert -0.5 <= rows.min() < -0.2 < 0.2 < rows.max() < 0.5
    assert rows.unique().numel() == 32


def test_safe_makedirs(tmp_path: Path) -> None:
    from torchrec_embcache.utils import safe_makedirs

    folder = tmp_path / "a" / "b"
    before = os.umask(0)
    try:
        safe_makedirs(str(folder))
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o750, 0o750]
    safe_makedirs(str(folder))
    with pytest.raises(FileExistsError):
        safe_makedirs(str(folder), exist_ok=False)


def test_check_path(tmp_path: Path) -> None:
    from torchrec_embcache.utils import check_path

    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"12345")
    link.symlink_to(file)
    check_path(str(file), need_exist=True, file_size_min=5, file_size_max=5)
    check_path(str(tmp_path), is_dir=True)
    check_path(str(tmp_path / "new"))
    check_path(str(tmp_path / "secrets" / "new"), black_dirs=[str(tmp_path / "secret")])
    for value, options, message in (
        (str(link), {}, "symbolic link"),
        (str(tmp_path / "new"), {"need_exist": True}, "does not exist"),
        (str(tmp_path / "new"), {"is_dir": True}, "does not exist"),
        (str(file), {"is_dir": True}, "no folder"),
        (str(file), {"file_size_min": 6}, "5 bytes, at least 6"),
        (str(file), {"file_size_max": 4}, "5 bytes, 0 to 4"),
        (str(file), {"black_dirs": [str(tmp_path)]}, "black_dirs"),
        (str(file), {"sensitive_words": ["fil"]}, "sensitive_words"),
        ("x" * 2000, {}, "1 to 1024"),
    ):
        with pytest.raises(ValueError, match=message):
            check_path(value, **options)
    with pytest.raises(TypeError, match="expected a string"):
        check_path(file)
    with pytest.raises(TypeError, match=r"\['nothing'\]"):
        check_path(str(file), nothing=1)
