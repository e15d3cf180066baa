"""Invalid tensors for whole tables, passed in state dicts or to views, are refused before any row changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import embeddings
import numpy as np
import pytest
import torch
from embeddings import embedding_of

from rec_sdk_torch.rules import Age, Count, Share
from rec_sdk_torch.tbe import TableBatchedEmbedding, TableConfig, TableLifecycle

LIFE = TableLifecycle(admission=Count(3), eviction=[Age(100), Share(0.1)])


def make(device: torch.device | None = None) -> TableBatchedEmbedding:
    tables = [TableConfig("h", 20, 4), TableConfig("i", 6, 4, hashed=False)]
    embedding = embedding_of(*tables, cache=6, device=device)
    train(embedding)
    return embedding


def train(embedding: TableBatchedEmbedding) -> None:
    embeddings.train(embedding, [1, 2, 3, 2, 5, 0], square=True)


def all_rows(embedding: TableBatchedEmbedding) -> list[Any]:
    chunks = [embedding.view(name).read(embedding.view(name).ids()) for name in "hi"]
    return [[chunk.ids.tolist(), *(part.tolist() for part in chunk.parts.values())] for chunk in chunks]


class Lazy(torch.Tensor):
    """A tensor that cannot be read."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.copy_, torch.Tensor.__getitem__, torch.Tensor.to, torch.Tensor.cpu):
            raise RuntimeError("planted: it cannot be read")
        return super().__torch_function__(func, types, args, kwargs or {})


ODD: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "sparse": (lambda w: w.to_sparse(), "torch.sparse_coo, expected a dense tensor"),
    "csr": (lambda w: w.to_sparse_csr(), "torch.sparse_csr, expected a dense tensor"),
    "quantized": (lambda w: torch.quantize_per_tensor(w, 0.1, 0, torch.qint8), "quantized"),
    "mkldnn": (lambda w: w.to_mkldnn(), "_mkldnn, expected a dense tensor"),
    "complex": (lambda w: torch.complex(w, w), "complex64, and tables are real"),
    "nested": (lambda w: torch.nested.nested_tensor(list(w)), "nested, expected a dense tensor"),
    "meta": (lambda w: w.to("meta"), "meta device"),
    "an array": (lambda w: w.numpy(), "is a ndarray, expected a tensor"),
    "None": (lambda w: None, "is a NoneType, expected a tensor"),
    "unreadable": (lambda w: w.as_subclass(Lazy), "planted"),
}


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("table", ["h", "i"])
@pytest.mark.parametrize("case", ODD)
def test_weights(case: str, table: str) -> None:
    embedding = make()
    before, state = all_rows(embedding), embedding.state_dict()
    odd, message = ODD[case]
    # The tables before and after the invalid one are not loaded either.
    given = {name: value + 1 if name.endswith("weight") else value for name, value in state.items()}
    given[f"{table}.weight"] = odd(state[f"{table}.weight"])
    with pytest.raises((RuntimeError, ValueError), match=message):
        embedding.load_state_dict(given)
    view = embedding.view(table)
    ids = torch.tensor([1, 2])
    for name in ("weight", "sum"):
        with pytest.raises((RuntimeError, ValueError), match=message):
            view.write(ids, {name: odd(torch.ones(2, 4))})
    assert all_rows(embedding) == before
    train(embedding)


IDS = {
    "float64": (torch.tensor([1.0, 2.0], dtype=torch.float64), "torch.float64"),
    "bool": (torch.tensor([True, False]), "torch.bool"),
    "complex": (torch.tensor([1, 2], dtype=torch.complex64), "complex64"),
    "twice": (torch.tensor([2, 2]), "1 of its ids are duplicates"),
    "two dimensions": (torch.tensor([[1, 2]]), "shape"),
    "sparse": (torch.tensor([1, 2]).to_sparse(), "sparse"),
    "meta": (torch.tensor([1, 2], device="meta"), "meta"),
}


@pytest.mark.parametrize("table", ["h", "i"])
@pytest.mark.parametrize("case", IDS)
def test_ids(case: str, table: str) -> None:
    embedding = make()
    ids, message = IDS[case]
    before, view = all_rows(embedding), embedding.view(table)
    with pytest.raises((RuntimeError, ValueError), match=message):
        view.write(ids, {"weight": torch.ones(2, 4)})
    if table == "h":
        with pytest.raises((RuntimeError, ValueError), match=message):
            embedding.load_state_dict({**embedding.state_dict(), "h.ids": ids, "h.weight": torch.ones(2, 4)})
    if case != "twice":
        for call in (view.remove, view.read, view.knows):
            with pytest.raises(TypeError, match=message):
                call(ids)
    assert all_rows(embedding) == before
    train(embedding)


def table_with_candidates() -> TableBatchedEmbedding:
    """Builds a table with rows 1 to 4 and candidates."""
    embedding = embedding_of(TableConfig("h", 20, 4, lifecycle=LIFE), cache=6)
    embedding.view("h").write(torch.arange(1, 5), {"weight": torch.ones(4, 4)})
    return embedding


COLUMNS: dict[str, tuple[Any, str]] = {
    "count": (torch.tensor([1.0, 2.0]), "expected torch.int64"),
    "timestamp": (torch.tensor([True, True]), "expected torch.int64"),
    "last_use": (torch.tensor([1, 2], dtype=torch.complex64), "real"),
    "score": (torch.tensor([1, 2]), "expected torch.float64"),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns(name: str) -> None:
    view = table_with_candidates().view("h")
    values, message = COLUMNS[name]
    ids, before = torch.tensor([1, 2]), view.row_columns(torch.tensor([1, 2]))
    columns = {each: column for each, column in before.items() if each == name} and {name: values}
    if name in before:
        with pytest.raises(TypeError, match=f"table 'h': {name} .*{message}"):
            view.write_row_columns(ids, columns)
    if name != "score":
        with pytest.raises(TypeError, match=message):
            view.set_candidates(torch.tensor([8, 9]), {"count": torch.tensor([1, 1]), name: values})
    assert {each: column.tolist() for each, column in view.row_columns(ids).items()} == {
        each: column.tolist() for each, column in before.items()
    }
    assert len(view.candidates()[0]) == 0


def test_invalid_candidates_are_refused() -> None:
    view = table_with_candidates().view("h")
    count = {"count": torch.tensor([1, 1])}
    view.set_candidates(torch.tensor([8, 9]), count)
    with pytest.raises(ValueError, match="1 of the candidates are duplicates"):
        view.set_candidates(torch.tensor([7, 7]), count)
    with pytest.raises(ValueError, match=r"1 candidates \(such as 3\) have rows"):
        view.set_candidates(torch.tensor([3, 7]), count)
    with pytest.raises(TypeError, match=r"ids are torch\.float64"):
        view.set_candidates(torch.tensor([7.0, 6.0], dtype=torch.float64), count)
    with pytest.raises(ValueError, match="score is not finite everywhere"):
        view.write_row_columns(torch.tensor([1]), {"score": torch.tensor([np.nan], dtype=torch.float64)})
    assert view.candidates()[0].tolist() == [8, 9]


def test_readable_tensors_are_accepted(device: torch.device) -> None:
    """Weights may be on a device, strided or expanded tensors, parameters, or integers."""
    for weight in (
        torch.ones(2, 4, device=device),
        torch.ones(4, 2).T,
        torch.ones(1).expand(2, 4),
        torch.nn.Parameter(torch.ones(2, 4)),
        torch.ones(2, 4, dtype=torch.int64),
        torch.ones(2, 4, dtype=torch.float64),
    ):
        embedding = make(device)
        embedding.view("h").write(torch.tensor([2, 9]), {"weight": weight})
        embedding.load_state_dict({**embedding.state_dict(), "h.ids": torch.tensor([2, 9]), "h.weight": weight})
        assert embedding.view("h").read(torch.tensor([2, 9])).parts["weight"].eq(1).all()
