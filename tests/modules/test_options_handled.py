"""Copies, state dicts, saves, collections and FBGEMM's module keep all options that option_cases.py lists."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from collection_factory import EACH_KIND, Kind
from option_cases import (
    OPTIONS,
    Absent,
    Arguments,
    Refused,
    Rows,
    Stored,
    default_of,
    expected,
    fill,
    make_collection,
    make_embedding,
    make_fbgemm,
    missing,
    observed,
)

import rec_sdk_torch as rst
from rec_sdk_torch.fbgemm import SplitTableBatchedEmbeddingBagsCodegen
from rec_sdk_torch.saves.format.manifest import read_manifest
from rec_sdk_torch.tbe import EmbeddingOptions, TableBatchedEmbedding

pytestmark = pytest.mark.usefixtures("_folder")


@pytest.fixture
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes relative paths of options and saves refer to a temporary folder."""
    monkeypatch.chdir(tmp_path)


def test_every_option_has_an_entry() -> None:
    assert missing() == [], "say in tests/option_cases.py what becomes of these options"


@EACH_KIND
def test_constructors_have_the_defaults_of_the_options(kind: Kind) -> None:
    made = make_embedding("EmbeddingOptions.seed").options
    assert made == EmbeddingOptions(seed=5)
    assert kind.collection(None, seed=5).embedding.options == made


@pytest.mark.parametrize("name", OPTIONS)
def test_examples_are_not_defaults(name: str) -> None:
    assert observed(name, make_embedding(name)) == OPTIONS[name].value != default_of(name)


@pytest.mark.parametrize("name", OPTIONS)
def test_copies(name: str) -> None:
    option = OPTIONS[name]
    embedding = make_embedding(name)
    assert observed(name, copy.deepcopy(embedding)) == expected(option, option.copy)
    del embedding  # it locks the folder of a host store, which the next embedding needs
    collection = make_collection(name, rst)
    assert observed(name, copy.deepcopy(collection).embedding) == expected(option, option.copy)


def weights(embedding: TableBatchedEmbedding) -> torch.Tensor:
    """Reads the rows that `fill` has written."""
    view = embedding.view(embedding.tables[0].name)
    return view.read(torch.arange(20), ["weight"]).parts["weight"]


def check_loaded(name: str, expectation: Rows, source: TableBatchedEmbedding, load: Callable[[Any], object]) -> None:
    """Loads into an embedding with the option, or without it if `expectation` is `Absent`; compares rows and option."""
    target = make_embedding(name, without=isinstance(expectation, Absent))
    load(target)
    assert torch.equal(weights(target), weights(source))
    if not isinstance(expectation, Absent):
        assert observed(name, target) == OPTIONS[name].value


@pytest.mark.parametrize("name", OPTIONS)
def test_state_dicts(name: str) -> None:
    expectation, embedding = OPTIONS[name].state_dict, make_embedding(name)
    if embedding.device.type != "meta":
        fill(embedding)
    state = embedding.state_dict()
    if isinstance(expectation, Stored):
        assert expectation.find(state) == OPTIONS[name].value
    if embedding.device.type != "meta":
        check_loaded(name, expectation, embedding, lambda target: target.load_state_dict(state))


@pytest.mark.parametrize("name", OPTIONS)
def test_saves(name: str) -> None:
    expectation, embedding = OPTIONS[name].save, make_embedding(name)
    if isinstance(expectation, Refused):
        with pytest.raises(RuntimeError, match=expectation.message):
            rst.Saver().save(embedding, "saves")
        return
    fill(embedding)
    (table,) = read_manifest(Path(rst.Saver().save(embedding, "saves"))).tables
    if isinstance(expectation, Stored):
        assert expectation.find(table) == OPTIONS[name].value
    check_loaded(name, expectation, embedding, lambda target: rst.Saver().load(target, "saves"))


@pytest.mark.parametrize("name", OPTIONS)
def test_collections(name: str) -> None:
    option = OPTIONS[name]
    assert observed(name, make_collection(name, rst).embedding) == expected(option, option.collection)


@pytest.mark.parametrize("name", OPTIONS)
def test_fbgemm(name: str) -> None:
    expectation = OPTIONS[name].fbgemm
    if isinstance(expectation, Absent):
        assert name.partition(".")[2] not in inspect.signature(SplitTableBatchedEmbeddingBagsCodegen).parameters
        assert observed(name, make_fbgemm(Arguments()).tables) == observed(name, make_embedding(name, without=True))
        return
    assert observed(name, make_fbgemm(expectation).tables) == expected(OPTIONS[name], expectation)
