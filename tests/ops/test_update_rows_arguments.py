"""Arguments that update_rows refuses: the argument is named, and nothing is written."""

from __future__ import annotations

import pytest
import torch
from op_batches import OPTIMIZERS, Cache, coefficients, int32

import rec_sdk_torch.ops  # noqa: F401


def good_arguments() -> dict[str, object]:
    return {
        "cache": Cache(torch.ones(5, 8), [torch.ones(5, 8)]).records,
        "grads": [torch.ones(3, 12)],
        "unique_slots": int32([4, 1]),
        "table_offsets": int32([0, 1, 2]),
        "segment_offsets": int32([0, 2, 3]),
        "grad_row": int32([0, 2, 1]),
        "grad_source": None,
        "grad_column": int32([0, 4, 1]),
        "scale": torch.ones(3),
        "coefficients": torch.cat([coefficients(0.1, 1e-8)] * 2),
        "optimizer": "adagrad",
        "dim": 8,
        "weight_dtype": torch.float32,
    }


BAD: list[tuple[str, object, str]] = [
    ("optimizer", "no_such", f"optimizer must be one of {', '.join(OPTIMIZERS)}; got 'no_such'"),
    ("dim", 0, r"dim must be in \[1, 1073741824\], got 0"),
    ("dim", 9, "cache must have 80 bytes per row for adagrad with dim 9, got 64"),
    ("weight_dtype", torch.float16, "cache must have 48 bytes per row for adagrad with dim 8, got 64"),
    ("weight_dtype", torch.int32, "weight_dtype must be of Float, Half or BFloat16, got Int"),
    ("cache", torch.ones(5, 16), "cache must be Byte, got Float"),
    ("cache", torch.ones(5, 128, dtype=torch.uint8)[:, :64], "cache must be contiguous"),
    ("cache", torch.ones(5 * 64 + 1, dtype=torch.uint8)[1:].view(5, 64), "cache must be aligned to 4 bytes"),
    ("grads", [torch.ones(3, 12).double()], r"grads\[0\] must be Float, got Double"),
    ("grads", [torch.ones(12, 3).t()], r"grads\[0\] must have stride\(1\) = 1"),
    ("grads", [torch.ones(1, 12).expand(3, 12)], r"grads\[0\] must have stride\(0\) >= size\(1\) = 12, got 0"),
    ("grads", [torch.ones(3, 7)], r"grads\[0\] must have at least 8 columns, got 7"),
    ("grads", [], "grads must have at least one gradient, got none"),
    ("grads", [torch.ones(3, 12)] * 2, "grad_source must say which of the 2 grads each lookup reads, got None"),
    ("grads", [torch.ones(3, 12), torch.ones(3)], r"grads\[1\] must have 2 dimension\(s\), got 1"),
    ("grad_source", torch.zeros(3), "grad_source must be Int, got Float"),
    ("grad_source", int32([0, 0]), r"grad_source must have 3 element\(s\), got 2"),
    ("unique_slots", torch.tensor([4, 1]), "unique_slots must be Int, got Long"),
    ("unique_slots", int32([1]), r"segment_offsets must have 2 element\(s\), got 3"),
    ("table_offsets", int32([0, 2]), r"coefficients must be \[1, 16\], got \[2, 16\]"),
    ("table_offsets", int32([]), "table_offsets must have tables"),
    ("grad_column", int32([0]), r"grad_column must have 3 element\(s\), got 1"),
    ("scale", torch.ones(2), r"scale must have 3 element\(s\), got 2"),
    ("scale", torch.ones(3).double(), "scale must be Float, got Double"),
    ("coefficients", torch.ones(2, 7), r"coefficients must be \[2, 16\], got \[2, 7\]"),
    ("hot_segments", torch.ones(1, 4), "hot_segments must be Int, got Float"),
    ("hot_segments", int32([0, 0, 1, 0]), r"hot_segments must have 2 dimension\(s\), got 1"),
    ("hot_segments", int32([[0, 0, 1]]), "hot_segments must have 4 columns, got 3"),
    ("hot_segments", int32([[0] * 4] * 4).t()[:2], "hot_segments must be contiguous"),
    ("row_norms", torch.ones(2, 2).double(), "row_norms must be Float, got Double"),
    ("row_norms", torch.ones(2), r"row_norms must have 2 dimension\(s\), got 1"),
    ("row_norms", torch.ones(2, 3), r"row_norms must be \[2, 2\], got \[2, 3\]"),
    ("row_norms", torch.ones(2, 2).t(), "row_norms must be contiguous"),
]

CONTENTS: list[tuple[str, object, str]] = [
    ("grads", [torch.ones(2, 12)], r"grad_row must be in \[0, 2\), got 2 at index 1"),
    ("grads", [torch.ones(3, 11)], r"grad_column must be in \[0, 4\), got 4 at index 1"),
    ("grad_source", int32([0, 0, 1]), r"grad_source must be in \[0, 1\), got 1 at index 2"),
    ("grad_source", int32([0, -1, 0]), r"grad_source must be in \[0, 1\), got -1 at index 1"),
    ("unique_slots", int32([5, 1]), r"unique_slots must be in \[0, 5\), got 5 at index 0"),
    ("table_offsets", int32([0, 1, 1]), "table_offsets must end at 2, got 1"),
    ("table_offsets", int32([0, 3, 2]), "table_offsets must not decrease, got 3 then 2 at index 2"),
    ("segment_offsets", int32([1, 2, 3]), "segment_offsets must start at 0, got 1"),
    ("segment_offsets", int32([0, 4, 3]), "segment_offsets must not decrease, got 4 then 3 at index 2"),
    ("segment_offsets", int32([0, 1, 2]), "segment_offsets must end at 3, got 2"),
    ("grad_row", int32([0, -1, 1]), r"grad_row must be in \[0, 3\), got -1 at index 1"),
    ("grad_column", int32([0, 5, 1]), r"grad_column must be in \[0, 5\), got 5 at index 1"),
]


SEVERAL: list[tuple[str, object, str]] = [
    ("grads", [torch.ones(3, 12), torch.ones(2, 12)], r"grad_row must be in \[0, 2\) for grads\[1\], got 2 at index 1"),
    ("grads", [torch.ones(3, 12), torch.ones(0, 12)], r"grad_row must be in \[0, 0\) for grads\[1\], got 2 at index 1"),
    (
        "grads",
        [torch.ones(3, 12), torch.ones(3, 11)],
        r"grad_column must be in \[0, 4\) for grads\[1\], got 4 at index 1",
    ),
    ("grad_row", int32([0, -1, 1]), r"grad_row must be in \[0, 3\) for grads\[1\], got -1 at index 1"),
]


def assert_refused(name: str, value: object, message: str, device: torch.device) -> None:
    refused(good_arguments() | {name: value}, message, device)


def refused(given: dict[str, object], message: str, device: torch.device) -> None:
    arguments = {key: moved(each, device) for key, each in given.items()}
    cache = arguments["cache"]
    assert isinstance(cache, torch.Tensor)
    before = cache.clone()
    with pytest.raises(RuntimeError, match=message):
        torch.ops.rec_sdk.update_rows(**arguments)
    assert torch.equal(cache, before)


def moved(value: object, device: torch.device) -> object:
    """The same on a device, a tensor with its strides and offset."""
    if isinstance(value, list):
        return [moved(each, device) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    elements = value.untyped_storage().nbytes() // value.element_size()
    whole = value.as_strided((elements,), (1,), 0).to(device)
    return whole.as_strided(value.shape, value.stride(), value.storage_offset())


HOT: list[tuple[object, str]] = [
    (int32([]).view(0, 4), "have every segment of more than 128 lookups, or be None; that of row 0 is missing"),
    (int32([[0, 0, 3, 0]]), "have every segment of more than 128 lookups, or be None; that of row 2 is missing"),
    (
        int32([[0, 0, 3, 0], [2, 428, 2, 3]]),
        r"\(row, first lookup, chunks, chunks before\): 2, 428, 1, 3 at index 1, got 2, 428, 2, 3",
    ),
    (int32([[0, 0, 3, 0], [2, 428, 1, 2]]), "2, 428, 1, 3 at index 1, got 2, 428, 1, 2"),
    (int32([[0, 0, 3, 0], [2, 427, 1, 3]]), "2, 428, 1, 3 at index 1, got 2, 427, 1, 3"),
    (int32([[1, 0, 3, 0], [2, 428, 1, 3]]), "0, 0, 3, 0 at index 0, got 1, 0, 3, 0"),
    (int32([[0, 0, 3, 0], [2, 428, 1, 3], [2, 428, 1, 4]]), "have the 2 segments of more than 128 lookups, got 3"),
]


@pytest.mark.contents
@pytest.mark.parametrize(("hot", "message"), HOT)
def test_hot_segments_that_are_not_those_of_the_offsets(hot: torch.Tensor, message: str) -> None:
    given = good_arguments() | {
        "unique_slots": int32([4, 1, 2]),
        "table_offsets": int32([0, 1, 3]),
        "segment_offsets": int32([0, 400, 428, 601]),
        "grad_row": int32([0] * 601),
        "grad_column": None,
        "scale": None,
        "hot_segments": hot,
    }
    refused(given, "hot_segments must .*" + message, torch.device("cpu"))


@pytest.mark.parametrize(("name", "value", "message"), BAD, ids=[f"{b[0]}-{i}" for i, b in enumerate(BAD)])
def test_refused(name: str, value: object, message: str, device: torch.device) -> None:
    assert_refused(name, value, message, device)


@pytest.mark.contents
@pytest.mark.parametrize(("name", "value", "message"), CONTENTS, ids=[f"{b[0]}-{i}" for i, b in enumerate(CONTENTS)])
def test_contents_refused(name: str, value: object, message: str, device: torch.device) -> None:
    assert_refused(name, value, message, device)


@pytest.mark.contents
@pytest.mark.parametrize(("name", "value", "message"), SEVERAL, ids=[f"{b[0]}-{i}" for i, b in enumerate(SEVERAL)])
def test_contents_of_several_refused(name: str, value: object, message: str, device: torch.device) -> None:
    several = {"grads": [torch.ones(3, 12)] * 2, "grad_source": int32([0, 1, 0])}
    refused(good_arguments() | several | {name: value}, message, device)


def test_good_arguments_are_accepted(device: torch.device) -> None:
    torch.ops.rec_sdk.update_rows(**{key: moved(each, device) for key, each in good_arguments().items()})
