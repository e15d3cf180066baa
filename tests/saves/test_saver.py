"""Full saves of unsharded tables, loads into other models, and torch's own ways to save tables."""

from __future__ import annotations

import json
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tables
import torch
import torch.distributed.checkpoint as dcp
import torchrec
from collection_factory import apply, bag_config, bags_collection
from embeddings import ADAM, SGD, embedding_of
from optimizer_table import BY_NAME, ROWS, Row
from tables import ADAGRAD, WINDOWS, assert_same, contents, loaded, make, refused, save, train, trained
from torch.distributed.checkpoint.api import CheckpointException

import rec_sdk_torch as rst
from rec_sdk_torch.saves.format.manifest import MANIFEST, read_manifest
from rec_sdk_torch.saves.format.manifest import ROWS as ROWS_ROLE


def optimizer_of(row: Row, window: int) -> tuple[type, dict[str, Any]]:
    """Returns the row's optimizer, with a rate that suits these batches."""
    windowed = {"use_accumulate": True, "accumulate_step": window} if window > 1 else {}
    return row.class_of(window), {**row.options, "lr": 0.01, **windowed}


@pytest.mark.parametrize(
    ("row", "window", "cache"),
    [
        *((row, 1, 9) for row in ROWS),
        *((BY_NAME[name], 1, 60) for name in ("sgd", "adagrad", "adam")),
        *((BY_NAME[name], 3, cache) for name in ("adagrad", "momentum_rmsprop") for cache in (9, 60)),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_load_has_the_bits_and_training_continues(
    row: Row, window: int, cache: int, tmp_path: Path, device: Any
) -> None:
    optimizer = optimizer_of(row, window)
    source = trained(5, optimizer, cache=cache, device=device)  # with a window of three passes: two of an open one
    folder = rst.Saver().save(source, tmp_path)
    assert folder == rst.Saver.get_latest_load_path(tmp_path)
    assert rst.Saver.is_timestamp_format(Path(folder).name)
    # these rows and this window are replaced
    target = trained(range(100, 103), optimizer, cache=29 if cache == 9 else 9, device=device)
    assert rst.Saver().load(target, tmp_path) == folder
    assert_same(target, source)
    for a, b in zip(train(source, range(5, 9)), train(target, range(5, 9)), strict=True):
        assert torch.equal(a, b)
    assert_same(target, source)


@pytest.mark.parametrize("saved", [torch.float32, torch.float16], ids=str)
def test_optimizer_states_of_other_data_types_are_converted(saved: torch.dtype, tmp_path: Path) -> None:
    cls, options = ADAGRAD
    source = trained(5, (cls, options | {"state_dtypes": {"sum": saved}}))
    save(source, tmp_path)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        target = loaded(tmp_path, optimizer=(cls, options | {"state_dtypes": {"sum": dtype}}), cache=9)
        if dtype is saved:
            assert_same(target, source)
        for name in "abcd":
            ids = source.view(name).ids()
            its, ours = (each.view(name).read(ids).parts for each in (target, source))
            assert torch.equal(its["weight"], ours["weight"])
            assert torch.equal(its["sum"], ours["sum"].to(dtype))
            assert its["sum"].dtype == dtype
            assert ours["sum"].any()


@pytest.mark.parametrize("kind", [torch.tensor, np.float32, float])
def test_options_of_optimizers_are_loaded(tmp_path: Path, kind: Any) -> None:
    source = trained(2)
    source.optimizers[0].options["lr"] = kind(0.25)
    save(source, tmp_path)
    (optimizer, *_) = loaded(tmp_path).optimizers
    assert (optimizer.options["lr"], optimizer.step) == (0.25, 2)


@pytest.mark.parametrize(
    ("saved", "other", "state"),
    [
        (ADAGRAD, SGD, 0.0),
        (ADAGRAD, ADAM, 0.0),
        (ADAGRAD, None, 0.0),
        (SGD, (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}), 0.5),
    ],
    ids=str,
)
def test_another_optimizer_gets_weights_alone(saved: Any, other: Any, state: float, tmp_path: Path) -> None:
    """Its states have their initial values; weights are converted if the model's dtype differs."""
    source, target = trained(3, saved), make(other)
    if other is None:
        configs = [rst.TableConfig(t.name, t.num_embeddings, t.embedding_dim, hashed=t.hashed) for t in source.tables]
        target = embedding_of(*configs, optimizer=None, cache=9)
    save(source, tmp_path)
    with pytest.warns(UserWarning, match=r"tables \['a', 'b', 'c', 'd'\] have another optimizer than the save: only"):
        rst.Saver().load(target, tmp_path)
    assert other is None or target.optimizers[0].step == 0
    for name in "abcd":
        ids, view = source.view(name).ids(), target.view(name)
        assert view.count() == len(ids) > 10
        parts, dtype = view.read(ids).parts, torch.float32 if other is None else source.view(name).config.weight_dtype
        weights = parts.pop("weight")
        assert torch.equal(weights, source.view(name).read(ids).parts["weight"].to(dtype))
        assert weights.dtype == dtype
        assert all(bool((part == state).all()) for part in parts.values())


DECAYING = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adam)
_PLAIN, _DECAYED = {"lr": 0.1}, {"lr": 0.1, "weight_decay": 0.5}


@pytest.mark.parametrize(
    ("saved", "other"),
    [
        *(((cls, one), (cls, other)) for cls in DECAYING for one, other in ((_PLAIN, _DECAYED), (_DECAYED, _PLAIN))),
        ((torch.optim.AdamW, _PLAIN), (torch.optim.Adam, _DECAYED)),
        ((torch.optim.Adam, _DECAYED), (torch.optim.AdamW, _PLAIN)),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("error:.*another optimizer")
def test_states_are_loaded_by_an_optimizer_with_other_decay(saved: Any, other: Any, tmp_path: Path) -> None:
    """The model keeps its own weight decay, which may be of another kind than the save's."""
    source, target = trained(3, saved), make(other)
    source.optimizers[0].options["lr"] = 0.25
    decay = target.optimizers[0].options.get("weight_decay")
    save(source, tmp_path)
    loaded(tmp_path, target)
    assert target.optimizers[0].step == 3
    assert target.optimizers[0].options["lr"] == 0.25
    assert target.optimizers[0].options.get("weight_decay") == decay
    for name in "abcd":
        chunk = target.view(name).read(source.view(name).ids())
        ours = source.view(name).read(chunk.ids).parts
        assert all(torch.equal(part, ours[which]) for which, part in chunk.parts.items())
        assert all(part.any() for part in chunk.parts.values())
    train(target, range(2))


def test_dropping_an_open_window_warns(tmp_path: Path) -> None:
    save(trained(2, WINDOWS), tmp_path)
    target = make((WINDOWS[0], {**WINDOWS[1], "accumulate_step": 2}))
    with pytest.warns(UserWarning, match="open accumulation window"):
        loaded(tmp_path, target)
    assert not target.layout.window_open()


def test_a_save_with_batches_in_flight_and_prefetched(tmp_path: Path) -> None:
    source, twin = trained(), trained()
    ahead = [tables.batch(seed) for seed in (3, 4)]
    for each in ahead:
        source.prefetch(*each)
    outputs = [source(*ahead[0])]
    save(source, tmp_path)
    outputs.append(twin(*ahead[0]))
    then = contents(twin)
    for output in outputs:
        output.square().sum().backward()
    for each in (source, twin):
        train(each, range(4, 6))
    assert_same(source, twin)
    assert_same(loaded(tmp_path), then)


def test_a_save_from_another_thread_is_one_moment(tmp_path: Path) -> None:
    """Each step adds the same to all rows of one-row tables, so in a consistent save their weights are equal."""
    config = {"hashed": True, "initializer_type": rst.InitializerType.UNIFORM, "init_min": 0.0, "init_max": 0.0}
    names = [f"t{i}" for i in range(4)]
    configs = [rst.TableConfig(name, 10, 4, **config) for name in names]
    optimizer = rst.TableOptimizer.create(torch.optim.SGD, {"lr": 1.0})
    source = rst.TableBatchedEmbedding(configs, optimizer=optimizer, cache=4)
    ids, offsets = torch.zeros(4, dtype=torch.int64), torch.arange(5)
    source(ids, offsets).sum().backward()
    stop = threading.Event()

    def go() -> None:
        while not stop.is_set():
            source(ids, offsets).sum().backward()

    thread = threading.Thread(target=go)
    thread.start()
    try:
        folders = []
        for _ in range(5):
            folders.append(save(source, tmp_path))
            step = optimizer.step
            while optimizer.step == step:  # the lock is not fair: the other thread must have run in between
                time.sleep(0.001)
    finally:
        stop.set()
        thread.join()
    steps = [read_manifest(folder).optimizers[0].step for folder in folders]
    for folder, step in zip(folders, steps, strict=True):
        target = loaded(folder, rst.TableBatchedEmbedding(configs, optimizer=optimizer, cache=4))
        weights = [target.view(name).read(torch.tensor([0])).parts["weight"] for name in names]
        assert torch.equal(torch.cat(weights), torch.full((4, 4), -1.0 * step))
    assert len(set(steps)) > 1


# ---- refused loads leave the model unchanged


def mismatched(name: str, *fields: int, **options: Any) -> rst.TableBatchedEmbedding:
    """Builds a model of one table that does not match the save."""
    return embedding_of(rst.TableConfig(name, *fields, **options), optimizer=None, cache=2)


def test_loads_that_are_refused(tmp_path: Path) -> None:
    source, target = trained(), trained(range(50, 52))
    folder, rows = save(source, tmp_path / "saves"), source.view("a").count()
    (tmp_path / "empty").mkdir()
    refused(target, tmp_path / "nothing", "nothing: there is no such folder")
    refused(target, tmp_path / "empty", "empty: holds no save")
    refused(mismatched("x", 10, 4), folder, "has no table 'x'")
    refused(mismatched("a", 10, 8), folder, "'a' has embedding_dim 4, the model has 8")
    refused(mismatched("a", 2, 4, hashed=False), folder, "are out of range for the index table 'a'")
    refused(mismatched("a", 60, 4, capacity=rows - 1), folder, f"its capacity here is {rows - 1}", rst.CapacityError)
    output = target(*tables.batch(1))
    refused(target, folder, "batches are in flight", RuntimeError)
    del output
    loaded(folder, target)
    fits = mismatched("a", 60, 4, capacity=rows)
    with pytest.warns(UserWarning, match="only their weights"):
        loaded(folder, fits)
    assert fits.view("a").count() == rows


def test_checkpoint_errors_are_value_and_runtime_errors(tmp_path: Path) -> None:
    for error in (ValueError, RuntimeError):
        with pytest.raises(error, match="there is no such folder"):
            loaded(tmp_path / "nowhere")
        with pytest.raises(error, match="holds no save"):
            rst.Saver.get_latest_load_path(tmp_path)
    path = save(trained(), tmp_path) / MANIFEST
    body = json.loads(path.read_text())
    for change, message in (({"format": "x"}, "not a manifest"), ({"version": 6}, "format version 6")):
        path.write_text(json.dumps({**body, **change}))
        with pytest.raises(rst.CheckpointError, match=message) as caught:
            loaded(path.parent)
        assert str(caught.value).count(str(path)) == 1, "it is told once"


def test_invalid_arguments_are_refused() -> None:
    for rank in ("0", True, 1.0):
        with pytest.raises(ValueError, match=f"rank is {rank!r}, expected an int"):
            rst.Saver(rank)
    with pytest.raises(ValueError, match="rank is -1"):
        rst.Saver(-1)
    for call in (rst.Saver().save, rst.Saver().load):
        with pytest.raises(ValueError, match=r"expected a torch\.nn\.Module"):
            call(3, "x")
    with pytest.raises(ValueError, match="has no embedding tables"):
        rst.Saver().save(torch.nn.Linear(1, 1), "x")


# ---- files


def test_rows_are_divided_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rec_sdk_torch.saves.save.rank_writer.MAX_FILE_BYTES", 300)
    monkeypatch.setattr("rec_sdk_torch.tbe.rows.table_chunks.CHUNK_BYTES", 160)
    source = trained()
    assert len(read_manifest(save(source, tmp_path)).files_of("b", ROWS_ROLE)) == 15
    assert_same(loaded(tmp_path), source)


def test_no_warning_where_nothing_is_lost(tmp_path: Path) -> None:
    source = trained()
    save(source, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for target in (make(), source):
            loaded(tmp_path, target)


# ---- torch's own ways to save


def test_pickling_names_the_alternative(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"rec_sdk_torch\.Saver\(\)\.save.*state_dict\(\)"):
        torch.save(torch.nn.Sequential(make()), tmp_path / "model.pt")


def read_back(path: Path) -> dict[str, torch.Tensor]:
    """Loads a checkpoint into tensors of its own sizes, since `load` fills existing tensors."""
    reader = dcp.FileSystemReader(path)
    sizes = reader.read_metadata().state_dict_metadata
    state = {key: torch.empty(each.size, dtype=each.properties.dtype) for key, each in sizes.items()}
    dcp.load(state, storage_reader=reader)
    return state


def test_torch_distributed_checkpoint(tmp_path: Path) -> None:
    """torch.distributed.checkpoint saves and loads index and hash tables."""
    source, target = trained(5), make()
    dcp.save(source.state_dict(), checkpoint_id=tmp_path)
    target.load_state_dict(read_back(tmp_path))
    for name in "abcd":
        ids = source.view(name).ids().sort().values
        assert torch.equal(target.view(name).ids(), ids)
        assert torch.equal(target.view(name).read(ids).parts["weight"], source.view(name).read(ids).parts["weight"])
    assert contents(target).keys() == contents(source).keys()


def collection() -> torch.nn.Module:
    fields = {"num_embeddings": 40, "embedding_dim": 8}
    index = torchrec.EmbeddingBagConfig(name="index", feature_names=["f1"], **fields)
    model = torch.nn.ModuleDict({"tables": bags_collection(None, bag_config("hash", **fields), index, cache=10)})
    apply(model["tables"], torch.optim.Adagrad, lr=0.1)
    return model


def test_torch_distributed_checkpoint_of_collections(tmp_path: Path) -> None:
    source, target = collection(), collection()
    for step in range(5):
        ids = torch.from_numpy(np.random.default_rng(step).integers(0, 40, 12))
        batch = torchrec.KeyedJaggedTensor(["f0", "f1"], ids, lengths=torch.ones(12, dtype=torch.int32))
        source["tables"](batch).values().square().sum().backward()
    saved = source.state_dict()
    dcp.save(saved, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp.load(target.state_dict(), checkpoint_id=tmp_path)
    target.load_state_dict(read_back(tmp_path))
    found = target.state_dict()
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[key], value) for key, value in saved.items())
    assert len(saved["tables.embedding_bags.hash.ids"]) > 10
