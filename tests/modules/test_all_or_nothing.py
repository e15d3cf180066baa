"""A load or forward that is refused or interrupted changes nothing.

The reference is everything that can be read from the collection before the call: weights, ids, states, counters, and
the accumulation buffer.
"""

from __future__ import annotations

import functools
import itertools
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import forked_python
import pytest
import torch
from batches import jagged
from collection_factory import EACH_KIND, Kind, apply
from counts import exact_counts
from interrupting import strike
from torchrec import KeyedJaggedTensor
from training import differing_tensors, state_of, train

import rec_sdk_torch as rst
from rec_sdk_torch._engine import Tables

FEATURES = ["f0", "f1", "f2", "f3"]
CACHE = 6


WINDOWS = pytest.mark.parametrize("window", [1, 3])


def steps(collection: Any, *firsts: int) -> None:
    train(collection, [jagged({key: [[i, i + 1], [i]] for key in FEATURES}) for i in firsts], square=True)


def trained(device: torch.device, kind: Kind, window: int = 1, **options: Any) -> Any:
    """Trains three groups, up to the middle of an accumulation window.

    Hash tables t0 and t2 share a dim and a group; index tables t1 and t3 are in groups of their own.
    """
    index = [kind.index(f"t{n}", [f"f{n}"], num_embeddings=12, embedding_dim=dim) for n, dim in ((1, 8), (3, 16))]
    tables = [kind.config(), index[0], kind.config("t2", ("f2",)), index[1]]
    collection = kind.collection(device, *tables, cache=CACHE, **options)
    steps(apply(collection, torch.optim.Adam, lr=0.1, window=window), 0, 4, 8, 2)
    return collection


def assert_trains_on(collection: Any, untouched: Any) -> None:
    for each in (collection, untouched):
        steps(each, 1, 5, 6, 9)
    assert not list(differing_tensors(state_of(untouched), state_of(collection)))


def changed(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Returns a copy of `state` with other values everywhere, and other ids in the hash tables."""
    return {key: value + 1000 if key.endswith("ids") else value + 1.0 for key, value in state.items()}


SPOILS: list[Callable[[torch.Tensor], Any]] = [
    lambda value: value.to("meta"),
    lambda value: value[:, :-1],
    lambda value: [1.0, 2.0],
]
REFUSALS = (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError)


@EACH_KIND
@WINDOWS
@pytest.mark.parametrize("table", ["t1", "t2"])
def test_a_failed_load_of_weights_changes_nothing(device: torch.device, kind: Kind, window: int, table: str) -> None:
    """If one table's values cannot be loaded, no table changes, and pending gradients are kept."""
    collection, untouched = trained(device, kind, window), trained(device, kind, window)
    before, state = state_of(collection), changed(collection.state_dict())
    (key,) = [key for key in state if key.endswith(f".{table}.weight")]
    wrong = [{**state, key: spoil(state[key])} for spoil in SPOILS]
    wrong += [{name: value for name, value in state.items() if name != key}, {**state, f"{key}s": state[key]}]
    for each in wrong:
        with pytest.raises(REFUSALS):
            collection.load_state_dict(each)
        assert not list(differing_tensors(before, state_of(collection)))
    assert_trains_on(collection, untouched)


@EACH_KIND
@pytest.mark.parametrize("table", ["t1", "t2"])
def test_a_failed_load_of_states_changes_nothing(device: torch.device, kind: Kind, table: str) -> None:
    collection = trained(device, kind)
    before = state_of(collection)
    for name, spoil in itertools.product((f"{table}.momentum1", f"{table}.exp_avg_sq"), SPOILS):
        state = {
            param: {key: value if key.endswith("ids") else value + 1 for key, value in values.items()}
            for param, values in before["states"].items()
        }
        (values,) = [values for values in state.values() if name in values]
        values[name] = spoil(values[name])
        with pytest.raises(REFUSALS):
            collection.fused_optimizer.load_state_dict({"state": state})
        assert not list(differing_tensors(before, state_of(collection)))


@EACH_KIND
def test_states_of_ids_that_the_table_does_not_know(device: torch.device, kind: Kind) -> None:
    """Optimizer states of unknown ids are refused: only weights or a batch can insert an id."""
    collection = trained(device, kind)
    before = state_of(collection)
    state = {param: dict(values) for param, values in before["states"].items()}
    (values,) = [values for values in state.values() if "t2.ids" in values]
    values["t2.ids"] = values["t2.ids"].clone()
    values["t2.ids"][-1] = 4711
    with pytest.raises(ValueError, match=r"t2.*\b(1 |4711)"):
        collection.fused_optimizer.load_state_dict({"state": state})
    assert not list(differing_tensors(before, state_of(collection)))


TOO_MANY = jagged({"f0": [[900]], "f1": [[99]], "f2": [[901]], "f3": [list(range(CACHE + 1))]})
"""A batch that is too large for the cache of t3, in the last group. t1 has an id out of range, t0 and t2 new ids."""
OUT_OF_RANGE = jagged({"f0": [[900]], "f1": [[3]], "f2": [[901]], "f3": [[77]]})
BAD_LENGTHS = jagged({"f0": [[900], [1]], "f1": [[99], [1]], "f2": [[901], [1]], "f3": [[3]]})
BAD_TYPE = KeyedJaggedTensor(FEATURES, torch.tensor([900.0, 99, 901, 3]), lengths=torch.ones(4, dtype=torch.int32))
REFUSED: dict[str, list[tuple[KeyedJaggedTensor, type[Exception]]]] = {
    "warning": [
        (TOO_MANY, rst.CacheTooSmallError),
        (OUT_OF_RANGE, UserWarning),
        (BAD_LENGTHS, ValueError),
        (BAD_TYPE, TypeError),
    ],
    "ignore": [(TOO_MANY, rst.CacheTooSmallError)],
    "fatal": [(OUT_OF_RANGE, IndexError)],
}
"""Refused batches by `bounds_check_mode`."""


@EACH_KIND
@WINDOWS
@pytest.mark.parametrize("mode", REFUSED)
def test_a_refused_forward_changes_nothing(device: torch.device, kind: Kind, window: int, mode: str) -> None:
    """Ids, counters (including bounds_errors), weights and pending batches are unchanged."""
    collection = trained(device, kind, window, bounds_check_mode=mode)
    before, counters = state_of(collection), exact_counts(collection)
    for batch, error in REFUSED[mode] * 3:
        with warnings.catch_warnings():
            warnings.simplefilter("error" if error is UserWarning else "ignore")
            with pytest.raises(error):
                collection(batch)
        assert exact_counts(collection) == counters
    assert not list(differing_tensors(before, state_of(collection)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning about ids that were never looked up would fail
        assert_trains_on(collection, trained(device, kind, window, bounds_check_mode=mode))


@EACH_KIND
def test_a_refused_read_changes_nothing(device: torch.device, kind: Kind) -> None:
    """An id of the last group is out of range, after the first group has been read."""
    collection = trained(device, kind, bounds_check_mode="fatal")
    before, counters = state_of(collection), exact_counts(collection)
    with pytest.raises(IndexError, match="t3"):
        collection.eval()(OUT_OF_RANGE)
    assert exact_counts(collection) == counters
    assert not list(differing_tensors(before, state_of(collection)))


@EACH_KIND
def test_running_out_of_memory_for_rows_changes_nothing(device: torch.device, kind: Kind) -> None:
    """When reserving a table's rows fails, its ids are already in its map and previous tables have reserved theirs."""
    collection = trained(device, kind)
    before, reserve = state_of(collection), Tables.reserve_rows
    for tables in range(1, 5):
        calls: list[Any] = []

        def refused(*arguments: Any, calls: list[Any] = calls, tables: int = tables) -> None:
            calls.append(arguments)
            if len(calls) == tables:
                raise MemoryError("no rows")
            reserve(*arguments)

        with mock.patch.object(Tables, "reserve_rows", refused), pytest.raises(MemoryError, match="no rows"):
            collection.load_state_dict(changed(before["rows"]))
        assert not list(differing_tensors(before, state_of(collection)))
    collection.load_state_dict(changed(before["rows"]))


CALLS: dict[str, Callable[[Any, dict[str, Any]], object]] = {
    "rows": lambda collection, state: collection.load_state_dict(state["rows"]),
    "states": lambda collection, state: collection.fused_optimizer.load_state_dict({"state": state["states"]}),
    "neither": lambda collection, state: state_of(collection),
}


@EACH_KIND
@pytest.mark.parametrize("every", [97, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("loaded", CALLS)
def test_an_interrupt(
    device: torch.device, kind: Kind, loaded: str, every: int, request: pytest.FixtureRequest
) -> None:
    """After Ctrl-C at any point of a load or save, all tables are loaded, or none is, or the next use raises an error
    that explains what happened.

    """
    collection, other = trained(device, kind, 3), trained(device, kind, 3)
    steps(other, 0, 4)
    targets = itertools.cycle([state_of(other), state_of(collection)])
    first = 1 + request.config.getoption("--day") % every
    for at in range(first, sys.maxsize, every):
        before, target = state_of(collection), next(targets)
        struck = strike(functools.partial(CALLS[loaded], collection, target), at)
        try:
            after = state_of(collection)
            steps(collection, 4)
        except RuntimeError as refused:
            assert "interrupt" in str(refused), struck  # noqa: PT017
            collection = trained(device, kind, 3)
            continue
        changed_parts = [part for part in after if list(differing_tensors(before[part], after[part]))]
        assert loaded in changed_parts or not changed_parts, struck
        assert not changed_parts or not list(differing_tensors(target[loaded], after[loaded])), struck
        if struck is None:
            break
    assert at > 50, "points of a call"


OUT_OF_MEMORY = """
import resource, sys
import torch
from batches import jagged
from collection_factory import apply, bag_config, bags_collection
from training import differing_tensors, train_step

device = torch.device(sys.argv[1])
torch.set_num_threads(1)
tables = [bag_config(f"t{n}", (f"f{n}",), embedding_dim=16) for n in range(3)]
collection = apply(bags_collection(device, *tables, cache=8), torch.optim.Adam)
train_step(collection, jagged({f"f{n}": [[1, 2, 3]] for n in range(3)}))
before = {key: value.clone() for key, value in collection.state_dict().items()}
state = {key: value + 1 for key, value in before.items()}
rows = 2_000_000
state["embedding_bags.t1.ids"] = torch.arange(rows)
state["embedding_bags.t1.weight"] = torch.ones(1, 1).expand(rows, 16)
(virtual,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmSize")]
limit = (int(virtual) << 10) + (150 << 20)  # the table alone is 384 MB
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
try:
    collection.load_state_dict(state)
    print("loaded")
except (MemoryError, RuntimeError) as error:
    assert isinstance(error, MemoryError) or "alloc" in str(error) or "memory" in str(error), error
    print("refused")
finally:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
after = collection.state_dict()
changed = differing_tensors(before, after)
print("changed:", [f"{k} {tuple(before[k].shape)} -> {tuple(after[k].shape)}" for k in changed])
train_step(collection, jagged({f"f{n}": [[1, 2, 4]] for n in range(3)}))
print("trains")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="address space is limited on Linux only")
def test_load_without_memory(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("a device's driver needs address space of its own")
    tests = Path(__file__).parents[1]
    done = forked_python.python("-c", OUT_OF_MEMORY, str(device), folder=tests)
    assert done.stdout.split("\n")[:3] == ["refused", "changed: []", "trains"], done.stdout + done.stderr
