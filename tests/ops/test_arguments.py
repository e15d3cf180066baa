"""Invalid arguments of an operator raise an error with the argument's name, and nothing is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_batches import OPTIMIZERS, Arguments, Cache, coefficients, good_calls, int32, moved, random_bytes

UPDATE: Arguments = {
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
SEVERAL = {"grads": [torch.ones(3, 12)] * 2, "grad_source": int32([0, 1, 0])}
HOT = {
    "unique_slots": int32([4, 1, 2]),
    "table_offsets": int32([0, 1, 3]),
    "segment_offsets": int32([0, 400, 428, 601]),
    "grad_row": int32([0] * 601),
    "grad_column": None,
    "scale": None,
}
CALLS = {name: call for name, (_, call) in good_calls("cpu").items()} | {"update_rows": UPDATE}
ROUNDED = {
    "row_ids": torch.arange(2),
    "rounding_seeds": torch.arange(2),
    "weight_dtype": torch.bfloat16,
    "cache": Cache(torch.ones(5, 8), [torch.ones(5, 8)], torch.bfloat16).records,
}

Case = tuple[str, Arguments, str]
BAD: list[Case] = [
    *(("update_rows", {name: value}, message) for name, value, message in (
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
        ("state_dtypes", [1, 1], "state_dtypes must "),
        ("state_dtypes", [3], "state_dtypes must "),
        ("hot_segments", torch.ones(1, 4), "hot_segments must be Int, got Float"),
        ("hot_segments", int32([0, 0, 1, 0]), r"hot_segments must have 2 dimension\(s\), got 1"),
        ("hot_segments", int32([[0, 0, 1]]), "hot_segments must have 4 columns, got 3"),
        ("hot_segments", int32([[0] * 4] * 4).t()[:2], "hot_segments must be contiguous"),
        ("row_norms", torch.ones(2, 2).double(), "row_norms must be Float, got Double"),
        ("row_norms", torch.ones(2), r"row_norms must have 2 dimension\(s\), got 1"),
        ("row_norms", torch.ones(2, 3), r"row_norms must be \[2, 2\], got \[2, 3\]"),
        ("row_norms", torch.ones(2, 2).t(), "row_norms must be contiguous"),
    )),
    *(("update_rows", ROUNDED | {name: value}, name) for name, value in (
        ("row_ids", torch.arange(1)),
        ("row_ids", int32([0, 1])),
        ("rounding_seeds", torch.arange(1)),
    )),
    ("accumulate_rows", {"pending": torch.zeros(5, 15)}, r"pending must have 2 \* dim columns .* got 15"),
    ("accumulate_rows", {"pending": torch.zeros(5, 32)[:, :16]}, "pending must be contiguous"),
    ("lookup_sequence", {"slots": torch.tensor([1])}, "slots must be Int, got Long"),
    ("lookup_sequence", {"slots": int32([[1]])}, r"slots must have 1 dimension\(s\), got 2"),
    ("lookup_sequence", {"slots": int32([1, 2, 3, 4])[::2]}, "slots must be contiguous"),
    ("lookup_sequence", {"weights": torch.ones(5, 8).double()}, "of Float, Half or BFloat16, got Double"),
    ("lookup_sequence", {"weights": torch.ones(4, 8).t()}, r"weights must have stride\(1\) = 1, got 8"),
    ("lookup_pooled", {"offsets": torch.tensor([], dtype=torch.int64)}, "offsets must have bags"),
    ("lookup_pooled", {"offsets": torch.zeros(4, dtype=torch.int64)}, r"bags 0 to 0 \+ 3 exceed the 2 bags"),
    ("lookup_pooled", {"mean": torch.tensor([True] * 2)}, r"mean must have 1 element\(s\), got 2"),
    ("lookup_pooled", {"out": torch.zeros(8, 2).t()}, r"out must have stride\(1\) = 1"),
    ("lookup_pooled", {"out": torch.zeros(2, 8).double()}, "out must be Float, got Double"),
    ("lookup_pooled", {"first_bag": -1}, "first_bag must not be negative, got -1"),
    ("lookup_pooled", {"first_bag": 1}, r"bags 1 to 1 \+ 2 exceed"),
    ("lookup_pooled", {"per_sample_weights": torch.ones(2)}, r"per_sample_weights must have 3 element\(s\), got 2"),
    ("gather_rows", {"cache": torch.ones(5, 32)}, "cache must be Byte, got Float"),
    ("gather_rows", {"cache": random_bytes(5, 64)[:, :32]}, "cache must be contiguous"),
    ("gather_rows.out", {"out": random_bytes(3, 8)}, r"out must be \[3, 32\], got \[3, 8\]"),
    ("gather_rows.out", {"out": random_bytes(3, 64)[:, :32]}, "out must be contiguous"),
    ("scatter_rows", {"rows": random_bytes(4, 32)}, r"rows must be \[3, 32\], got \[4, 32\]"),
    ("swap_rows", {"cache": random_bytes(5, 64)[:, :32]}, "cache must be contiguous"),
    ("swap_rows", {"victims": random_bytes(2, 8)}, r"victims must be \[2, 32\], got \[2, 8\]"),
    ("swap_rows", {"victims": random_bytes(4, 32)}, "victims must have at most 3 rows, got 4"),
    *((f"swap_{kind}", {name: value}, f"rec_sdk::swap_{kind}: {message}")
      for kind in ("rows", "lookup_sequence", "lookup_pooled") for name, value, message in (
        ("cache", torch.zeros(5, 32), "cache must be Byte, got Float"),
        ("victim_indices", int32([0]), "victim_indices must have 3 element"),
        ("rows", random_bytes(4, 32), r"rows must be \[3, 32\], got \[4, 32\]"),
    )),
    *((f"swap_{kind}", {name: value}, f"rec_sdk::swap_{kind}: {message}")
      for kind in ("lookup_sequence", "lookup_pooled") for name, value, message in (
        ("victim_indices", None, "victim_indices and victims belong together"),
        ("victims", None, "victim_indices and victims belong together"),
        ("origins", int32([0, 5]), r"origins must have 3 element\(s\), got 2"),
        ("lookup_slots", torch.zeros(3, dtype=torch.int64), "lookup_slots must be Int, got Long"),
        *(("dim", dim, rf"dim must be in \[1, {2**30}\], got {dim}") for dim in (0, 2**30 + 1, 2**62)),
        ("dim", 9, "cache must have a multiple of 4 bytes per row, at least 36 for dim 9, got 32"),
        ("weight_dtype", torch.float64, "weight_dtype must be of Float, Half or BFloat16, got Double"),
    )),
]  # fmt: skip

CONTENTS: list[Case] = [
    *(("update_rows", {name: value}, message) for name, value, message in (
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
    )),
    *(("update_rows", SEVERAL | {name: value}, message) for name, value, message in (
        ("grads", [torch.ones(3, 12), torch.ones(2, 12)], r"grad_row .* \[0, 2\) for grads\[1\], got 2 at index 1"),
        ("grads", [torch.ones(3, 12), torch.ones(0, 12)], r"grad_row .* \[0, 0\) for grads\[1\], got 2 at index 1"),
        ("grads", [torch.ones(3, 12), torch.ones(3, 11)], r"grad_column .* \[0, 4\) for grads\[1\], got 4 at index 1"),
        ("grad_row", int32([0, -1, 1]), r"grad_row must be in \[0, 3\) for grads\[1\], got -1 at index 1"),
    )),
    *(("update_rows", HOT | {"hot_segments": hot}, f"hot_segments must .*{message}") for hot, message in (
        (int32([]).view(0, 4), "every segment of more than 128 lookups, or be None; the segment of row 0 is missing"),
        (int32([[0, 0, 3, 0]]), "every segment of more than 128 lookups, or be None; the segment of row 2 is missing"),
        (int32([[0, 0, 3, 0], [2, 428, 2, 3]]),
         r"\(row, first lookup, chunks, chunks before\): 2, 428, 1, 3 at index 1, got 2, 428, 2, 3"),
        (int32([[0, 0, 3, 0], [2, 428, 1, 2]]), "2, 428, 1, 3 at index 1, got 2, 428, 1, 2"),
        (int32([[0, 0, 3, 0], [2, 427, 1, 3]]), "2, 428, 1, 3 at index 1, got 2, 427, 1, 3"),
        (int32([[1, 0, 3, 0], [2, 428, 1, 3]]), "0, 0, 3, 0 at index 0, got 1, 0, 3, 0"),
        (int32([[0, 0, 3, 0], [2, 428, 1, 3], [2, 428, 1, 4]]), "have the 2 segments of more than 128 lookups, got 3"),
    )),
    ("accumulate_rows", {"pending": torch.zeros(3, 16)}, r"unique_slots must be in \[0, 3\), got 4 at index 1"),
    *(("lookup_sequence", {"slots": int32([0, 4, slot])}, rf"slots must be in \[0, 5\), got {slot} at index 2")
      for slot in (-1, 5, 2**31 - 1, -(2**31))),
    ("lookup_pooled", {"offsets": torch.tensor([1, 2, 3])}, "offsets must start at 0, got 1"),
    ("lookup_pooled", {"offsets": torch.tensor([0, 4, 3])}, "offsets must not decrease, got 4 then 3 at index 2"),
    ("lookup_pooled", {"offsets": torch.tensor([0, 2, 2])}, "offsets must end at 3, got 2"),
    ("lookup_pooled", {"columns": torch.tensor([-1])}, r"columns must be in \[0, 0\] .* got -1 at index 0"),
    ("lookup_pooled", {"columns": torch.tensor([1])}, r"columns must be in \[0, 0\] .* got 1 at index 0"),
    ("lookup_pooled", {"slots": int32([0, 5, 0])}, r"slots must be in \[0, 5\), got 5 at index 1"),
    ("gather_rows", {"slots": int32([0, 5, 1])}, r"slots must be in \[0, 5\), got 5 at index 1"),
    ("gather_rows.out", {"slots": int32([7, 0, 1])}, r"slots must be in \[0, 5\), got 7 at index 0"),
    ("scatter_rows", {"slots": int32([-1, 5, 1])}, r"slots must be in \[0, 5\), got -1 at index 0"),
    *(("swap_rows", {"victim_indices": int32(victim_indices)}, message) for victim_indices, message in (
        ([0, 0, 1], r"victim_indices must be -1 or the next of 0, 1, ..., here 1, got 0 at index 1"),
        ([-2, 0, 1], "here 0, got -2 at index 0"),
        ([-1, -1, -1], "victims must have one row for each of the 0 indices that are not -1, got 2"),
    )),
    *((f"swap_{kind}", {name: value}, message)
      for kind in ("rows", "lookup_sequence", "lookup_pooled") for name, value, message in (
        ("victim_indices", int32([0, 1, 2]), "victims must have one row for each of the 3 indices that are not"),
        ("slots", int32([1, 0, 5]), r"slots must be in \[0, 5\), got 5 at index 2"),
        ("slots", int32([-1, 0, 4]), r"slots must be in \[0, 5\), got -1 at index 0"),
    )),
    *((f"swap_{kind}", {name: int32(value)}, message)
      for kind in ("lookup_sequence", "lookup_pooled") for name, value, message in (
        ("lookup_slots", [1, 5, 4], r"lookup_slots must be in \[0, 5\), got 5 at index 1"),
        ("origins", [5, 5, 8], r"origins must be in \[0, 8\), got 8 at index 2"),
        ("origins", [5, 1, 7], "origins must be 5 for slot 1, got 1 at index 1"),
        ("origins", [6, 5, 7], "origins must be 5 for slot 1, got 6 at index 0"),
    )),
]  # fmt: skip
"""Wrong contents of index tensors, which only the CPU operators check."""


def tensors(arguments: Arguments) -> list[torch.Tensor]:
    return [each for each in arguments.values() if isinstance(each, torch.Tensor)]


def cases(every: list[Case], *marks: Any) -> Any:
    rows = [pytest.param(*case, id=f"{case[0]} {number}", marks=marks) for number, case in enumerate(every)]
    return rows


@pytest.mark.parametrize(("name", "changes", "message"), cases(BAD) + cases(CONTENTS, pytest.mark.contents))
def test_invalid_arguments_are_refused(name: str, changes: Arguments, message: str, device: torch.device) -> None:
    operator, _ = good_calls(device)[name]
    given = moved(CALLS[name] | changes, device)
    before = [each.clone() for each in tensors(given)]
    with pytest.raises(RuntimeError, match=message):
        operator(**given)
    assert all(torch.equal(*pair) for pair in zip(tensors(given), before, strict=True)), "something is written"


def test_good_arguments_are_accepted(device: torch.device) -> None:
    for more in ({}, SEVERAL, ROUNDED, HOT | {"hot_segments": int32([[0, 0, 3, 0], [2, 428, 1, 3]])}):
        torch.ops.rec_sdk.update_rows(**moved(UPDATE | more, device))
