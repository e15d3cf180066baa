"""A refused call leaves no trace: loads that fail half-way, and forwards.

The reference is everything that can be read of the collection before: weights, ids, states, counters, and the window.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import warm
from counts import exact_counts
from jagged import (
    apply,
    bag_config,
    bags_collection,
    jagged,
    output_values,
    same_bits,
    sequence_config,
    sequences_collection,
)
from torchrec import EmbeddingBagConfig, EmbeddingConfig

import rec_sdk_torch as rst
from rec_sdk_torch._engine import Tables

FEATURES = ["f0", "f1", "f2", "f3"]
CACHE = 6


def pooled(device: torch.device, window: int = 1, **options: Any) -> Any:
    """Three groups: hash tables t0 and t2 of one dim, index tables t1 and t3 of their own."""
    tables = [
        bag_config(),
        EmbeddingBagConfig(num_embeddings=12, embedding_dim=8, name="t1", feature_names=["f1"]),
        bag_config("t2", ("f2",)),
        EmbeddingBagConfig(num_embeddings=12, embedding_dim=16, name="t3", feature_names=["f3"]),
    ]
    return trained(bags_collection(device, *tables, cache=CACHE, **options), window)


def sequence(device: torch.device, window: int = 1, **options: Any) -> Any:
    tables = [
        sequence_config(),
        EmbeddingConfig(num_embeddings=12, embedding_dim=8, name="t1", feature_names=["f1"]),
        sequence_config("t2", ("f2",)),
        EmbeddingConfig(num_embeddings=12, embedding_dim=16, name="t3", feature_names=["f3"]),
    ]
    return trained(sequences_collection(device, *tables, cache=CACHE, **options), window)


def batch(first: int) -> Any:
    return jagged({feature: [[first, first + 1], [first]] for feature in FEATURES})


def step(collection: Any, first: int) -> None:
    output_values(collection(batch(first))).square().sum().backward()


def trained(collection: Any, window: int) -> Any:
    """After four steps, which leave a window of three open."""
    if window == 1:
        apply(collection, torch.optim.Adam, lr=0.1)
    else:
        apply(collection, rst.AccumulateAdam, lr=0.1, use_accumulate=True, accumulate_step=window)
    for first in (0, 4, 8, 2):
        step(collection, first)
    return collection


def everything(collection: Any) -> dict[str, Any]:
    """A copy of all that can be read."""
    states = collection.fused_optimizer.state_dict()["state"]
    found = {"weights": dict(collection.state_dict()), "states": {k: dict(v) for k, v in states.items()}}
    found["ids"] = {f"t{n}": collection.table_ids(f"t{n}").clone() for n in range(4)}
    return found


def other_state(collection: Any) -> dict[str, torch.Tensor]:
    """A state that differs in every value, and in the ids of the hash tables."""
    state = {}
    for key, value in collection.state_dict().items():
        state[key] = value + 1000 if key.endswith("ids") else value + 1.0
    return state


def key_of(state: dict[str, torch.Tensor], table: str) -> str:
    (key,) = [key for key in state if key.endswith(f".{table}.weight")]
    return key


Spoil = Callable[[dict[str, torch.Tensor], str], None]


def to_meta(state: dict[str, torch.Tensor], key: str) -> None:
    state[key] = state[key].to("meta")


def wrong_shape(state: dict[str, torch.Tensor], key: str) -> None:
    state[key] = state[key][:, :-1]


def no_tensor(state: dict[str, Any], key: str) -> None:
    state[key] = [1.0, 2.0]


def missing(state: dict[str, torch.Tensor], key: str) -> None:
    del state[key]


def more(state: dict[str, torch.Tensor], key: str) -> None:
    state[f"{key}s"] = state[key]


SPOILED: list[Spoil] = [to_meta, wrong_shape, no_tensor, missing, more]
KINDS = pytest.mark.parametrize("make", [pooled, sequence])


@KINDS
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("table", ["t1", "t2"])
@pytest.mark.parametrize("spoil", SPOILED)
def test_load_of_weights(device: torch.device, make: Any, window: int, table: str, spoil: Spoil) -> None:
    """One table's values cannot be loaded: no table changes, and the window that is open stays."""
    collection, untouched = make(device, window), make(device, window)
    before, state = everything(collection), other_state(collection)
    spoil(state, key_of(state, table))
    with pytest.raises((RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError)):
        collection.load_state_dict(state)
    assert not list(same_bits(before, everything(collection)))
    for first in (1, 5, 6, 9):
        step(collection, first)
        step(untouched, first)
    assert not list(same_bits(everything(untouched), everything(collection))), "trains on as if nothing had come"


@KINDS
@pytest.mark.parametrize("table", ["t1", "t2"])
@pytest.mark.parametrize("spoil", [to_meta, wrong_shape, no_tensor])
@pytest.mark.parametrize("name", ["momentum1", "exp_avg_sq"])
def test_load_of_states(device: torch.device, make: Any, table: str, spoil: Spoil, name: str) -> None:
    collection = make(device)
    before = everything(collection)
    state = {
        param: {key: value if key.endswith("ids") else value + 1 for key, value in values.items()}
        for param, values in before["states"].items()
    }
    (values,) = [values for values in state.values() if f"{table}.{name}" in values]
    spoil(values, f"{table}.{name}")
    with pytest.raises((RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError)):
        collection.fused_optimizer.load_state_dict({"state": state})
    assert not list(same_bits(before, everything(collection)))


@KINDS
def test_states_of_ids_that_the_table_does_not_know(device: torch.device, make: Any) -> None:
    """They are refused: an id comes with its weight, or in a batch."""
    collection = make(device)
    before = everything(collection)
    state = {param: dict(values) for param, values in before["states"].items()}
    (values,) = [values for values in state.values() if "t2.ids" in values]
    values["t2.ids"] = values["t2.ids"].clone()
    values["t2.ids"][-1] = 4711
    with pytest.raises(ValueError, match=r"t2.*\b(1 |4711)"):
        collection.fused_optimizer.load_state_dict({"state": state})
    assert not list(same_bits(before, everything(collection)))


# ---- forwards


def too_many(collection: Any) -> None:
    """For the cache of t3, whose group is the last; t1 has an id out of range, t0 and t2 new ones."""
    collection(jagged({"f0": [[900]], "f1": [[99]], "f2": [[901]], "f3": [list(range(CACHE + 1))]}))


def out_of_range(collection: Any) -> None:
    collection(jagged({"f0": [[900]], "f1": [[3]], "f2": [[901]], "f3": [[77]]}))


def bad_lengths(collection: Any) -> None:
    collection(jagged({"f0": [[900], [1]], "f1": [[99], [1]], "f2": [[901], [1]], "f3": [[3]]}))


def bad_type(collection: Any) -> None:
    features = jagged({"f0": [[900]], "f1": [[99]], "f2": [[901]], "f3": [[3]]})
    collection(type(features)(features.keys(), features.values().float(), lengths=features.lengths()))


REFUSED: dict[str, tuple[Callable[[Any], None], str, type[Exception]]] = {
    "cache": (too_many, "warning", rst.CacheTooSmallError),
    "cache, ids out of range ignored": (too_many, "ignore", rst.CacheTooSmallError),
    "id out of range": (out_of_range, "fatal", IndexError),
    "warning that is an error": (out_of_range, "warning", UserWarning),
    "lengths": (bad_lengths, "warning", ValueError),
    "type": (bad_type, "warning", TypeError),
}


@KINDS
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("case", REFUSED)
def test_forward(device: torch.device, make: Any, window: int, case: str) -> None:
    """Ids, counters (bounds_errors among them), weights and what can be trained on stay."""
    refused, mode, error = REFUSED[case]
    collection = make(device, window, bounds_check_mode=mode)
    before, counters = everything(collection), exact_counts(collection)
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("error" if error is UserWarning else "ignore")
            with pytest.raises(error):
                refused(collection)
        assert exact_counts(collection) == counters
    assert not list(same_bits(before, everything(collection)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of ids that were never looked up
        untouched = make(device, window, bounds_check_mode=mode)
        for first in (1, 5, 6, 9):
            step(collection, first)
            step(untouched, first)
    assert not list(same_bits(everything(untouched), everything(collection)))


@KINDS
def test_refused_read(device: torch.device, make: Any) -> None:
    """The first group has been read when the last one finds an id that is out of range."""
    collection = make(device, bounds_check_mode="fatal")
    before, counters = everything(collection), exact_counts(collection)
    collection.eval()
    with pytest.raises(IndexError, match="t3"):
        out_of_range(collection)
    assert exact_counts(collection) == counters
    assert not list(same_bits(before, everything(collection)))


# ---- memory


@pytest.mark.parametrize("make", [pooled, sequence])
@pytest.mark.parametrize("tables", [1, 2, 3, 4])
def test_rows_of_a_table_find_no_memory(device: torch.device, make: Any, tables: int) -> None:
    """Its ids are in its map by then, and so are those of the tables before."""
    collection = make(device)
    before = everything(collection)
    reserve, calls = Tables.reserve_rows, []

    def refused(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == tables:
            raise MemoryError("no rows")
        reserve(*arguments)

    with mock.patch.object(Tables, "reserve_rows", refused), pytest.raises(MemoryError, match="no rows"):
        collection.load_state_dict(other_state(collection))
    assert not list(same_bits(before, everything(collection)))
    collection.load_state_dict(other_state(collection))


OUT_OF_MEMORY = """
import resource, sys
import torch
from jagged import apply, bag_config, bags_collection, jagged, same_bits, train_step

device = torch.device(sys.argv[1])
torch.set_num_threads(1)
tables = [bag_config(f"t{n}", (f"f{n}",), embedding_dim=16) for n in range(3)]
collection = bags_collection(device, *tables, cache=8)
apply(collection, torch.optim.Adam)
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
print("changed:", [f"{k} {tuple(before[k].shape)} -> {tuple(after[k].shape)}" for k in same_bits(before, after)])
train_step(collection, jagged({f"f{n}": [[1, 2, 4]] for n in range(3)}))
print("trains")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="address space is limited on Linux only")
def test_load_without_memory(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("a device's driver needs address space of its own")
    tests = Path(__file__).parents[1]
    done = warm.python("-c", OUT_OF_MEMORY, str(device), folder=tests)
    assert done.stdout.split("\n")[:3] == ["refused", "changed: []", "trains"], done.stdout + done.stderr
