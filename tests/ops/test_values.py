"""Every entry of `KERNELS`, overloads included: the device's kernel and the default operator, each compared
with one line of torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from op_batches import default, good_calls
from torch.nn.functional import embedding_bag

from rec_sdk_torch.operators.default import KERNELS

Values = dict[str, torch.Tensor]


def floats(records: torch.Tensor) -> torch.Tensor:
    return records.view(torch.float32)


def after_swap(a: Any) -> torch.Tensor:
    return floats(a.cache.index_copy(0, a.slots.long(), a.rows))


def swapped(a: Any) -> Values:
    return {"cache": after_swap(a), "victims": floats(a.cache[a.slots[a.victim_indices >= 0].long()])}


def bags(a: Any, weights: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    scale = a.per_sample_weights
    sums = embedding_bag(
        slots.long(), weights, a.offsets, mode="sum", per_sample_weights=scale, include_last_offset=True
    )
    return sums / a.offsets.diff()[:, None]


def weights_grad(a: Any) -> torch.Tensor:
    lengths = a.offsets.diff()
    grads = (a.grad / lengths[:, None]).repeat_interleave(lengths, 0)
    return (a.weights[a.slots.long()] * grads).sum(1)


def sums(a: Any, columns: int) -> torch.Tensor:
    """Returns sums of gradients that are all 1, in the first 8 of `columns` columns."""
    found = torch.zeros(5, columns)
    found[a.unique_slots.long(), :8] = a.segment_offsets.diff()[:, None].float()
    return found


VALUES: dict[str, Callable[[Any], Values]] = {
    "lookup_sequence": lambda a: {"result": a.weights[a.slots.long()]},
    "lookup_pooled": lambda a: {"out": bags(a, a.weights, a.slots)},
    "pooled_weights_grad": lambda a: {"result": weights_grad(a)},
    "update_rows": lambda a: {"cache": floats(a.cache) - 0.1 * sums(a, 8)},
    "accumulate_rows": lambda a: {"pending": sums(a, 16)},
    "gather_rows": lambda a: {"result": a.cache[a.slots.long()]},
    "gather_rows.out": lambda a: {"out": a.cache[a.slots.long()]},
    "scatter_rows": lambda a: {"cache": after_swap(a)},
    "swap_rows": swapped,
    "swap_lookup_sequence": lambda a: {**swapped(a), "result": after_swap(a)[a.lookup_slots.long()]},
    "swap_lookup_pooled": lambda a: {**swapped(a), "out": bags(a, after_swap(a), a.lookup_slots)},
}
"""The results and written arguments of each operator for the arguments of `good_calls`."""


@pytest.mark.parametrize("name", KERNELS)
def test_values(name: str, device: torch.device) -> None:
    operator, arguments = good_calls(device)[name]
    on_cpu = good_calls("cpu")[name][1]
    expected = VALUES[name](SimpleNamespace(**on_cpu))
    schema = operator.default._schema if hasattr(operator, "default") else operator._schema
    written = {each.name for each in schema.arguments if each.is_write and arguments.get(each.name) is not None}
    assert set(expected) == written | ({"result"} if schema.returns else set())
    runs: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (operator, arguments),
        (functools.partial(default, name), good_calls("cpu")[name][1]),
    ]
    for run, given in runs:
        found = given | {"result": run(**given)}
        for key, wanted in expected.items():
            torch.testing.assert_close(found[key].cpu().view(wanted.dtype), wanted, msg=f"{name}: {key}")
