"""Full saves of unsharded tables, and what they load into."""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tables
import torch
from optimizer_table import BY_NAME, ROWS, Row
from tables import ADAGRAD, WINDOWS, contents, make, train

import rec_sdk_torch as rst
from rec_sdk_torch.saves.format import manifest as manifests
from rec_sdk_torch.saves.format.tensors import TensorReader

ADAM = (torch.optim.Adam, {"lr": 0.01})


def same(a: Any, b: Any) -> None:
    """Dicts of dicts, compared so that a failure says where."""
    assert a.keys() == b.keys()
    for name in a:
        assert a[name] == b[name], name


def of_row(row: Row, window: int) -> tuple[type, dict[str, Any]]:
    """The row's optimizer, at a rate that suits the batches here."""
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
def test_a_load_has_the_bits_and_goes_on_alike(row: Row, window: int, cache: int, tmp_path: Path, device: Any) -> None:
    optimizer = of_row(row, window)
    source = make(optimizer, cache=cache, device=device)
    train(source, range(5))  # with a window of three passes: two of an open one
    folder = rst.Saver().save(source, tmp_path)
    assert folder == rst.Saver.get_latest_load_path(tmp_path)
    assert rst.Saver.is_timestamp_format(Path(folder).name)
    target = make(optimizer, cache=29 if cache == 9 else 9, device=device)
    train(target, range(100, 103))  # other rows, and another window, which go
    assert rst.Saver().load(target, tmp_path) == folder
    same(contents(target), contents(source))
    for a, b in zip(train(source, range(5, 12)), train(target, range(5, 12)), strict=True):
        assert torch.equal(a, b)
    same(contents(target), contents(source))


@pytest.mark.parametrize("saved", [torch.float32, torch.float16], ids=str)
def test_optimizer_states_of_other_data_types_are_converted(saved: torch.dtype, tmp_path: Path) -> None:
    cls, options = ADAGRAD
    source = make((cls, options | {"state_dtypes": {"sum": saved}}))
    train(source, range(5))
    rst.Saver().save(source, tmp_path)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        target = make((cls, options | {"state_dtypes": {"sum": dtype}}), cache=9)
        rst.Saver().load(target, tmp_path)
        if dtype is saved:
            same(contents(target), contents(source))
        for config in source.tables:
            ids = source.view(config.name).ids()
            its, ours = (each.view(config.name).read(ids).parts for each in (target, source))
            assert torch.equal(its["weight"], ours["weight"])
            assert torch.equal(its["sum"], ours["sum"].to(dtype))
            assert its["sum"].dtype == dtype
            assert ours["sum"].any()


@pytest.mark.parametrize("kind", [torch.tensor, np.float32, float])
def test_options_of_optimizers_are_loaded(tmp_path: Path, kind: Any) -> None:
    source, target = make(), make()
    train(source, range(2))
    source.optimizers[0].options["lr"] = kind(0.25)
    rst.Saver().save(source, tmp_path)
    rst.Saver().load(target, tmp_path)
    assert target.optimizers[0].options["lr"] == 0.25
    assert target.optimizers[0].step == 2


def test_other_data_types_are_converted(tmp_path: Path) -> None:
    source = make()
    train(source, range(3))
    rst.Saver().save(source, tmp_path)
    other = rst.TableBatchedEmbedding(
        [rst.TableConfig(t.name, t.num_embeddings, t.embedding_dim, hashed=t.hashed) for t in source.tables], cache=9
    )
    with pytest.warns(UserWarning, match="another optimizer than the save: only their weights"):
        rst.Saver().load(other, tmp_path)
    for config in source.tables:
        ours, its = source.view(config.name), other.view(config.name)
        assert its.count() == ours.count()
        weights = its.read(ours.ids(), ["weight"]).parts["weight"]
        assert weights.dtype == torch.float32
        assert torch.equal(weights, ours.read(ours.ids(), ["weight"]).parts["weight"].float())


def test_states_that_a_save_lacks_begin_anew(tmp_path: Path) -> None:
    """They have their first values, which are not 0, in rows that are loaded."""
    source = tables.make((torch.optim.SGD, {"lr": 0.1}))
    tables.train(source, range(3))
    rst.Saver().save(source, tmp_path)
    target = tables.make((torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}))
    with pytest.warns(UserWarning, match="only their weights"):
        rst.Saver().load(target, tmp_path)
    for name in "abcd":
        view = target.view(name)
        chunk = view.read(view.ids())
        assert torch.equal(chunk.parts["weight"], source.view(name).read(chunk.ids).parts["weight"])
        assert bool((chunk.parts["sum"] == 0.5).all())
        assert len(chunk.ids) > 10


DECAYING = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adam)
_PLAIN, _DECAYED = {"lr": 0.1}, {"lr": 0.1, "weight_decay": 0.5}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        *(((cls, one), (cls, other)) for cls in DECAYING for one, other in ((_PLAIN, _DECAYED), (_DECAYED, _PLAIN))),
        ((torch.optim.AdamW, _PLAIN), (torch.optim.Adam, _DECAYED)),
        ((torch.optim.Adam, _DECAYED), (torch.optim.AdamW, _PLAIN)),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("error:.*another optimizer")
def test_states_are_loaded_by_an_optimizer_with_other_decay(saved: Any, loaded: Any, tmp_path: Path) -> None:
    """The model keeps its decay, which may be of another kind than that of the save."""
    source, target = make(saved), make(loaded)
    train(source, range(3))
    source.optimizers[0].options["lr"] = 0.25
    decay = target.optimizers[0].options.get("weight_decay")
    rst.Saver().save(source, tmp_path)
    rst.Saver().load(target, tmp_path)
    assert target.optimizers[0].step == 3
    assert target.optimizers[0].options["lr"] == 0.25
    assert target.optimizers[0].options.get("weight_decay") == decay
    for name in "abcd":
        view = target.view(name)
        chunk = view.read(source.view(name).ids())
        ours = source.view(name).read(chunk.ids).parts
        assert all(torch.equal(part, ours[which]) for which, part in chunk.parts.items())
        assert all(part.any() for part in chunk.parts.values())
    train(target, range(2))


@pytest.mark.parametrize("optimizer", [(torch.optim.SGD, {"lr": 0.1}), ADAM], ids=str)
def test_another_optimizer_gets_weights_alone(optimizer: Any, tmp_path: Path) -> None:
    source, target = make(), make(optimizer)
    train(source, range(3))
    rst.Saver().save(source, tmp_path)
    with pytest.warns(UserWarning, match=r"tables \['a', 'b', 'c', 'd'\] have another optimizer than the save"):
        rst.Saver().load(target, tmp_path)
    assert target.optimizers[0].step == 0
    for name in "abcd":
        view = target.view(name)
        chunk = view.read(source.view(name).ids())
        assert torch.equal(chunk.parts["weight"], source.view(name).read(chunk.ids).parts["weight"])
        assert all(not part.any() for part in [p for n, p in chunk.parts.items() if n != "weight"])


def test_a_window_that_the_model_cannot_go_on_with_is_said(tmp_path: Path) -> None:
    source, target = make(WINDOWS), make((WINDOWS[0], {**WINDOWS[1], "accumulate_step": 2}))
    train(source, range(2))
    rst.Saver().save(source, tmp_path)
    with pytest.warns(UserWarning, match="open accumulation window"):
        rst.Saver().load(target, tmp_path)
    assert not target.layout.window_open()


def test_a_save_with_batches_in_flight_and_prefetched(tmp_path: Path) -> None:
    source, twin = make(), make()
    train(source, range(3))
    train(twin, range(3))
    ahead = [tables.batch(seed) for seed in (3, 4)]
    for each in ahead:
        source.prefetch(*each)
    in_flight = source(*ahead[0])
    rst.Saver().save(source, tmp_path)
    twin_out = twin(*ahead[0])
    saved = contents(twin)
    for each in (in_flight, twin_out):
        each.square().sum().backward()
    train(source, range(4, 6))
    train(twin, range(4, 6))
    same(contents(source), contents(twin))
    target = make()
    rst.Saver().load(target, tmp_path)
    same(contents(target), saved)


def test_a_save_from_another_thread_is_one_moment(tmp_path: Path) -> None:
    """Each step adds the same to all rows of one-row tables: of one moment, their weights are alike."""
    config = {"hashed": True, "initializer_type": rst.InitializerType.UNIFORM, "init_min": 0.0, "init_max": 0.0}
    names = [f"t{i}" for i in range(4)]
    optimizer = rst.TableOptimizer.create(torch.optim.SGD, {"lr": 1.0})
    source = rst.TableBatchedEmbedding(
        [rst.TableConfig(name, 10, 4, **config) for name in names], optimizer=optimizer, cache=4
    )
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
            folders.append(rst.Saver().save(source, tmp_path))
            step = optimizer.step
            while optimizer.step == step:  # the lock is not fair: the other thread must have been in between
                time.sleep(0.001)
    finally:
        stop.set()
        thread.join()
    seen = set()
    for folder in folders:
        target = rst.TableBatchedEmbedding(source.tables, optimizer=optimizer, cache=4)
        step = manifests.read_manifest(Path(folder)).optimizers[0].step
        rst.Saver().load(target, folder)
        for name in names:
            assert torch.equal(
                target.view(name).read(torch.tensor([0])).parts["weight"], torch.full((1, 4), -1.0 * step)
            )
        seen.add(step)
    assert len(seen) > 1


# ---- what is refused, with the model as it was


def refused(target: Any, path: Path, message: str, error: type[Exception] = rst.CheckpointError) -> None:
    before = contents(target)
    with pytest.raises(error, match=message):
        rst.Saver().load(target, path)
    same(contents(target), before)


def saved(tmp_path: Path) -> tuple[Any, Path]:
    source = make()
    train(source, range(3))
    return source, Path(rst.Saver().save(source, tmp_path))


def test_loads_that_are_refused(tmp_path: Path) -> None:
    _, folder = saved(tmp_path / "saves")
    target = make()
    train(target, range(50, 52))
    refused(target, tmp_path / "nothing", "nothing: there is no such folder")
    (tmp_path / "empty").mkdir()
    refused(target, tmp_path / "empty", "empty: holds no save")
    other = rst.TableBatchedEmbedding([rst.TableConfig("x", 10, 4)], cache=4)
    refused(other, folder, "has no table 'x'")
    other = rst.TableBatchedEmbedding([rst.TableConfig("a", 10, 8)], cache=4)
    refused(other, folder, "'a' has embedding_dim 4, the model's 8")
    other = rst.TableBatchedEmbedding([rst.TableConfig("a", 2, 4, hashed=False)], cache=2)
    refused(other, folder, "are no rows of the index table 'a'")
    other = rst.TableBatchedEmbedding([rst.TableConfig("a", 4, 4, capacity=4)], cache=4)
    refused(other, folder, "its capacity here is 4", rst.CapacityError)
    output = target(*tables.batch(1))
    refused(target, folder, "batches are in flight", RuntimeError)
    del output
    rst.Saver().load(target, folder)


def test_a_save_that_just_fits(tmp_path: Path) -> None:
    source, folder = saved(tmp_path)
    ids = source.view("a").ids()
    target = rst.TableBatchedEmbedding([rst.TableConfig("a", 60, 4, capacity=len(ids))], cache=4)
    with pytest.warns(UserWarning, match="only their weights"):
        rst.Saver().load(target, folder)
    assert torch.equal(target.view("a").read(ids).parts["weight"], source.view("a").read(ids).parts["weight"])
    less = rst.TableBatchedEmbedding([rst.TableConfig("a", 60, 4, capacity=len(ids) - 1)], cache=4)
    refused(less, folder, f"its capacity here is {len(ids) - 1}", rst.CapacityError)


@pytest.mark.parametrize("what", ["missing", "truncated", "flipped", "longer"])
def test_damaged_files_are_named(what: str, tmp_path: Path) -> None:
    _, folder = saved(tmp_path)
    target = make()
    train(target, range(50, 52))
    for file in sorted(each for each in folder.rglob("*") if each.is_file() and not each.name.startswith("index")):
        raw = file.read_bytes()
        if what == "missing":
            file.unlink()
        elif what == "truncated":
            file.write_bytes(raw[:-1])
        elif what == "longer":
            file.write_bytes(raw + b"x")
        else:
            file.write_bytes(raw[:-9] + bytes([raw[-9] ^ 4]) + raw[-8:])
        refused(target, folder if what != "missing" or file.name != manifests.MANIFEST else tmp_path, file.name)
        file.write_bytes(raw)
    rst.Saver().load(target, folder)


def test_foreign_and_later_manifests(tmp_path: Path) -> None:
    _, folder = saved(tmp_path)
    path = folder / manifests.MANIFEST
    body = json.loads(path.read_text())
    for change, message in (({"format": "x"}, "not of a save"), ({"version": 6}, "format version 6")):
        path.write_text(json.dumps({**body, **change}))
        refused(make(), folder, message)


def test_what_is_wrong_with_a_save_is_a_value_error_and_a_runtime_error(tmp_path: Path) -> None:
    for error in (ValueError, RuntimeError):
        with pytest.raises(error, match="there is no such folder"):
            rst.Saver().load(make(), tmp_path / "nowhere")
        with pytest.raises(error, match="holds no save"):
            rst.Saver.get_latest_load_path(tmp_path)
    _, folder = saved(tmp_path)
    path = folder / manifests.MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": "x"}))
    with pytest.raises(rst.CheckpointError) as caught:
        rst.Saver().load(make(), folder)
    assert str(caught.value).count(str(path)) == 1  # it is told once


def test_arguments() -> None:
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
    assert not any(
        rst.Saver.is_timestamp_format(name) for name in ("2026", "20261341000000", "latest", "2026112310450x")
    )


# ---- files


def test_others_can_read_the_files(tmp_path: Path) -> None:
    source, folder = saved(tmp_path)
    manifest = manifests.read_manifest(folder)
    (file,) = manifest.files_of("a", manifests.ROWS)
    raw = (folder / file.path).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    begin, end = header["weight"]["data_offsets"]
    weight = torch.frombuffer(bytearray(raw[8 + length + begin : 8 + length + end]), dtype=torch.float32).reshape(-1, 4)
    with TensorReader(folder / file.path) as reader:
        assert torch.equal(reader.read("weight"), weight)
        assert torch.equal(source.view("a").read(reader.read("ids")).parts["weight"], weight)


def test_rows_are_divided_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rec_sdk_torch.saves.save.writing.MOST_BYTES", 300)
    monkeypatch.setattr("rec_sdk_torch.tbe.rows.pieces.PIECE_BYTES", 160)
    source, folder = saved(tmp_path)
    assert len(manifests.read_manifest(folder).files_of("b", manifests.ROWS)) == 15
    target = make()
    rst.Saver().load(target, folder)
    same(contents(target), contents(source))


def test_saves_in_the_same_second_have_names_in_order(tmp_path: Path) -> None:
    source = make()
    folders = [rst.Saver().save(source, tmp_path) for _ in range(3)]
    assert sorted(set(folders)) == folders
    assert rst.Saver.get_latest_load_path(tmp_path) == folders[-1]
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_no_warning_where_nothing_is_lost(tmp_path: Path) -> None:
    source, folder = saved(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rst.Saver().load(make(), folder)
        rst.Saver().load(source, folder)
