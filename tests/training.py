"""Training steps on collections, and comparisons of the results, for tests of all folders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from batches import single_ids
from torchrec import KeyedJaggedTensor, KeyedTensor


def output_parts(output: Any) -> list[torch.Tensor]:
    """Returns the pooled output of a collection, or the values of each sequence."""
    return [output.values()] if isinstance(output, KeyedTensor) else [part.values() for part in output.values()]


def output_values(output: Any) -> torch.Tensor:
    """Returns a collection's output on the host: pooled `[B, total]`, or all values of the sequences in one
    flat tensor.
    """
    if isinstance(output, KeyedTensor):
        return output.values().cpu()
    return torch.cat([part.values().flatten() for part in output.values()]).cpu()


def train_step(
    collection: torch.nn.Module, batch: KeyedJaggedTensor, factor: float = 1.0, *, square: bool = False
) -> torch.Tensor:
    """Runs a training step; returns the outputs. The loss is `factor` times the sum of the outputs, or of their
    squares.
    """
    output = output_values(collection(batch))
    (factor * (output.square() if square else output).sum()).backward()
    return output.detach()


def train(
    collection: torch.nn.Module, batches: Iterable[KeyedJaggedTensor], *, square: bool = False
) -> list[torch.Tensor]:
    """Runs `train_step` on each batch; returns the outputs."""
    return [train_step(collection, batch, square=square) for batch in batches]


def state_of(collection: Any) -> dict[str, Any]:
    """Returns the rows of all tables and the states of their optimizer, as a save would contain them."""
    return {"rows": collection.state_dict(), "states": collection.fused_optimizer.state_dict()["state"]}


def rows_of(collection: torch.nn.Module, table: str = "t0") -> dict[int, torch.Tensor]:
    """Returns a table's rows by id, as float32."""
    state = collection.state_dict()
    (key,) = [key for key in state if key.endswith(f".{table}.weight")]
    weight = state[key].float()
    ids = state.get(key.replace(".weight", ".ids"), torch.arange(len(weight)))
    return dict(zip(ids.tolist(), weight, strict=True))


def equal_rows(one: Mapping[int, torch.Tensor], other: Mapping[int, torch.Tensor]) -> bool:
    """Returns whether two results of `rows_of` have the same ids with the same bits."""
    return one.keys() == other.keys() and all(torch.equal(row, other[i]) for i, row in one.items())


def read(collection: torch.nn.Module, batch: KeyedJaggedTensor) -> torch.Tensor:
    """Returns the output in evaluation mode; restores the module's mode afterwards."""
    training = collection.training
    collection.eval()
    try:
        return output_values(collection(batch)).detach()
    finally:
        collection.train(training)


def assert_trains(collection: torch.nn.Module, ids: Sequence[int] = (3, 1, 3), lr: float = 0.5) -> None:
    """Checks that the model looks up its rows, and that an SGD step changes each row by lr times its number of lookups.

    The collection's only feature must be f0 of table t0.
    """
    batch = single_ids(ids)
    before = read(collection, batch)
    assert torch.equal(train_step(collection, batch).flatten(), before.flatten())
    after = read(collection, batch).reshape(len(ids), -1)
    count = Counter(ids)
    steps = torch.tensor([lr * count[i] for i in ids])
    torch.testing.assert_close(after, before.reshape(len(ids), -1) - steps[:, None], rtol=1e-6, atol=1e-6)


def differing_tensors(left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[str]:
    """Yields the names of the tensors in which two (nested) state dicts differ."""
    if left.keys() != right.keys():
        yield f"keys {sorted(left)} and {sorted(right)}"
        return
    for name, value in left.items():
        if isinstance(value, Mapping):
            yield from (f"{name}/{inner}" for inner in differing_tensors(value, right[name]))
        elif not torch.equal(value, right[name]):
            yield name
