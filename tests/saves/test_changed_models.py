"""A save is loaded into a model with other rules, sizes, optimizer or dtypes, and that model then saves its changes.

The model's first save is a delta if its rows have the same columns and parts as the loaded save, else a full save.
Readers return the same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from embeddings import SGD, embedding_of
from tables import ADAGRAD, WINDOWS, assert_same, contents, delta, loaded, refused, save, written
from torchrec.optim.optimizers import LAMB

from rec_sdk_torch import AccumulateSGD
from rec_sdk_torch.checkpoint.__main__ import main
from rec_sdk_torch.rules import Age, Count, Idle, Norm, Probability, Rows, Score, Share, Sketch
from rec_sdk_torch.saves.format.manifest import DELTA, FULL, read_manifest
from rec_sdk_torch.serving import TableReader
from rec_sdk_torch.tbe import InitializerType, Pooling, TableBatchedEmbedding, TableConfig, TableLifecycle

RULES = {
    "none": None,
    "kept": TableLifecycle(keep_evicted=True),
    "admitted": TableLifecycle(admission=Count(2)),
    "sketch": TableLifecycle(admission=Sketch(2, bytes=500)),
    "chance": TableLifecycle(admission=Probability(0.5)),
    "idle": TableLifecycle(admission=Count(2), eviction=Idle(3), every=2, keep_evicted=True),
    "age": TableLifecycle(admission=Count(2), eviction=Age(25), every=2, keep_evicted=True),
    "norm": TableLifecycle(eviction=Norm(0.001), every=2),
    "share": TableLifecycle(eviction=Share(0.1), every=4),
    "clicks": TableLifecycle(eviction=Share(0.1), every=4, score=Score(beta=2)),
    "half-life": TableLifecycle(eviction=Share(0.1), every=4, score=Score(half_life=2)),
    "bound": TableLifecycle(bound=Rows(30), keep_evicted=True),
}
OPTIMIZERS = {
    "no optimizer": None,
    "SGD": SGD,
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 0.1}),
    "LAMB": (LAMB, {"lr": 0.1}),
    "AdamW, narrow": (torch.optim.AdamW, {"lr": 0.1, "state_dtypes": {"exp_avg": torch.bfloat16}}),
    "SGD windows": (AccumulateSGD, {"lr": 0.1, "use_accumulate": True, "accumulate_step": 2}),
}
FORMATS: dict[str, dict[str, Any]] = {
    "hash": {},
    "half": {"weight_dtype": torch.float16},
    "index": {"hashed": False},
    "fewer": {"hashed": False, "num_embeddings": 40},
}
SAME_NAMES = {"Adam": {"LAMB": None}}
"""Optimizers with equal names of states that have another meaning."""
IGNORED = pytest.mark.filterwarnings("ignore::UserWarning")
"""A filter for warnings about saved contents that a changed model does not load."""


class Model(NamedTuple):
    """The configuration of a model: names of its rules, optimizer and table format."""

    rules: str = "none"
    optimizer: str = "SGD"
    format: str = "hash"

    def make(self, cache: int = 60) -> TableBatchedEmbedding:
        fields = {"hashed": True, "num_embeddings": 60, **FORMATS[self.format]}
        lifecycle = RULES[self.rules] if fields["hashed"] else None
        table = TableConfig("t", embedding_dim=4, track_changes=True, lifecycle=lifecycle, **fields)
        return embedding_of(table, optimizer=OPTIMIZERS[self.optimizer], cache=min(cache, table.num_embeddings))


def change(model: TableBatchedEmbedding, seed: int) -> None:
    """Trains three batches; if the table has no optimizer, writes rows instead."""
    random, (table,) = np.random.default_rng(seed), model.tables
    for step in range(seed, seed + 3):
        ids = torch.from_numpy(random.integers(0, 40, 24))
        if model.optimizers[0] is None:
            rows = ids.unique()
            model.view("t").write(rows, {"weight": torch.rand(len(rows), 4).to(table.weight_dtype)})
            continue
        seen = {"clicks": ids % 2} if table.lifecycle is not None and table.lifecycle.needs_clicks else {}
        if table.lifecycle is not None and table.lifecycle.rule(Age):
            seen["timestamps"] = 10 * step + ids % 10
        model(ids, torch.arange(0, 25, 4), **seen).square().sum().backward()


def columns_and_parts(model: TableBatchedEmbedding) -> tuple[set[str], set[str]]:
    """Returns the names of the columns and of the parts of a row."""
    lifecycle, optimizer = model.tables[0].lifecycle, model.optimizers[0]
    states = [] if optimizer is None else [state.name for state in optimizer.spec.states]
    return set(lifecycle.columns() if lifecycle else ()), {"weight", *states}


def family(model: Model) -> str:
    """Returns the name of the optimizer family whose states are interchangeable."""
    return "Adam" if model.optimizer.startswith("Adam") else model.optimizer


def partners(request: pytest.FixtureRequest, table: dict[str, Any], before: str) -> list[str]:
    """Returns the names in `table` to test after `before`: all with --full, else a quarter that depends on the day."""
    if request.config.getoption("--full"):
        return list(table)
    shift = list(table).index(before) + request.config.getoption("--day")
    return list(dict.fromkeys(list(table)[shift % 4 :: 4]) | SAME_NAMES.get(before, {}))


def check_readers(model: TableBatchedEmbedding, path: Path, again: TableBatchedEmbedding) -> None:
    """Checks that loads and readers return the model's rows, and that `verify` accepts the save."""
    assert_same(loaded(path, again), model)
    view = model.view("t")
    ids = view.ids()
    with TableReader(path, "t") as reader:
        rows, found = reader.find(ids)
    assert bool(found.all())
    assert torch.equal(rows, view.read(ids).parts["weight"])
    assert main(["verify", str(path)]) == 0


def follow(before: Model, after: Model, path: Path) -> None:
    """Saves a model, loads the save into a second model, and saves the second model twice."""
    source, model = before.make(), after.make()
    change(source, 0)
    save(source, path)
    loaded(path, model)
    kinds = []
    for seed in (10, 20):
        change(model, seed)
        kinds.append(written(model, path).kind)
    check_readers(model, path, after.make(cache=50))
    same_states = columns_and_parts(model)[1] == {"weight"} or family(before) == family(after)
    same_rows = columns_and_parts(source) == columns_and_parts(model) and same_states and before.format == after.format
    assert kinds == [DELTA if same_rows else FULL, DELTA]


KINDS: dict[str, tuple[dict[str, Any], Callable[[str], Model]]] = {
    "rules": (RULES, Model),
    "optimizer": (OPTIMIZERS, lambda name: Model("idle", name)),
    "format": (FORMATS, lambda name: Model(format=name)),
}


@IGNORED
@pytest.mark.parametrize(("kind", "before"), [(kind, name) for kind, (names, _) in KINDS.items() for name in names])
def test_a_changed_model_loads_and_saves(
    kind: str, before: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    names, model = KINDS[kind]
    for after in partners(request, names, before):
        follow(model(before), model(after), tmp_path / after)


BEGUN = {"idle": "last_use", "age": "timestamp"}
"""Rules by the time since an event of a row, and the column with the time of the event."""


def check_nothing_is_overdue(model: TableBatchedEmbedding, rules: str, saved: set[str]) -> None:
    """Checks that no id is overdue because a time that the rules need is missing in the save.

    `saved` are the columns of the save.
    """
    if rules not in BEGUN or BEGUN[rules] in saved:
        return
    view = model.view("t")
    before = view.ids().sort().values, view.candidates()[0]
    assert view.evict() == 0
    assert all(map(torch.equal, (view.ids().sort().values, view.candidates()[0]), before))


def once(model: TableBatchedEmbedding, ids: torch.Tensor, time: int) -> None:
    """Runs one training step that looks up each of `ids` once."""
    lifecycle = model.tables[0].lifecycle
    seen = {"timestamps": torch.full_like(ids, time)} if lifecycle is not None and lifecycle.rule(Age) else {}
    if lifecycle is not None and lifecycle.needs_clicks:
        seen["clicks"] = torch.zeros_like(ids)
    model(ids, torch.tensor([0, len(ids)]), **seen).sum().backward()


@IGNORED
@pytest.mark.parametrize("after", BEGUN)
@pytest.mark.parametrize("before", RULES)
def test_new_rules_start_counting_at_the_load(before: str, after: str, tmp_path: Path) -> None:
    """Rows, candidates and untaken evicted rows become overdue only some time after the load."""
    source, model = Model(before).make(), Model(after).make()
    saved, view = columns_and_parts(source)[0], model.view("t")
    for seed in range(0, 30, 3):
        change(source, seed)
    once(source, torch.arange(100, 105), 300)  # ids looked up once, which stay candidates if the rules have admission
    source.view("t").remove(source.view("t").ids()[:3])
    source.view("t").set_clocks({"timestamp": 300})  # emulates a table that had timestamps before
    save(source, tmp_path)
    loaded(tmp_path, model)
    if BEGUN[after] in saved:
        return
    check_nothing_is_overdue(model, after, saved)
    assert torch.equal(view.candidates()[0], source.view("t").candidates()[0])
    assert (len(view.candidates()[0]) > 0) == (before in ("admitted", "idle", "age"))
    waited = view.take_evicted()
    assert (len(waited) > 0) == (RULES[before] is not None and RULES[before].keep_evicted)
    view.put_back(waited)
    assert bool(view.knows(waited.ids).all())
    check_nothing_is_overdue(model, after, saved)
    ids = view.ids()
    assert len(ids) > 20
    for step in range(4):
        once(model, torch.tensor([90]), 300 + 10 * step)
        view.evict()
        assert bool(view.knows(ids).any()) == (step < (3 if after == "age" else 2))


def loaded_elsewhere(
    random: np.random.Generator, model: TableBatchedEmbedding, before: Model, path: Path
) -> tuple[TableBatchedEmbedding, Model]:
    """Loads the latest save into a randomly drawn model and returns that model.

    Returns `model` itself if its rows do not fit the drawn model.
    """
    drawn = [str(random.choice(list(table))) for table in (RULES, OPTIMIZERS, FORMATS)]
    after = Model(*(new if random.random() < 0.4 else old for new, old in zip(drawn, before, strict=True)))
    other = after.make(cache=int(random.integers(30, 60)))
    (old,), (new,) = model.tables, other.tables
    if old.hashed and not new.hashed and int(model.view("t").ids().max()) >= new.num_embeddings:
        refused(other, path, "are out of range for the index table")
        return model, before
    loaded(path, other)
    check_nothing_is_overdue(other, after.rules if new.hashed else "none", columns_and_parts(model)[0])
    return other, after


@IGNORED
def test_random_sequences_of_configurations(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Random sequences of training, saves, and loads into randomly drawn models.

    Each save has the rows of the model that wrote it.
    """
    day, full = request.config.getoption("--day"), request.config.getoption("--full")
    for seed in range(day, day + (20 if full else 1)):
        random, path = np.random.default_rng(seed), tmp_path / str(seed)
        drawn, then = Model(), {}
        model = drawn.make()
        for step in range(12):
            change(model, 10 * step)
            folder = delta(model, path)
            then[folder] = drawn, contents(model), read_manifest(folder).kind
            if random.random() < 0.5:
                model, drawn = loaded_elsewhere(random, model, drawn, path)
        assert {kind for _, _, kind in then.values()} == {FULL, DELTA}
        for folder, (its, expected, _) in then.items():
            assert_same(loaded(folder, its.make()), expected)


# ---- index tables with more or fewer rows


def of_sizes(rows: int = 60, optimizer: Any = ADAGRAD, hashed: bool = False) -> TableBatchedEmbedding:
    """Builds index tables, the first with `rows` rows, optionally as a hash table."""
    fields: dict[str, Any] = {"initializer_type": InitializerType.UNIFORM, "track_changes": True}
    configs = [
        TableConfig(name, size, 4, hashed=hashed and name == "i", pooling=Pooling.SUM, **fields)
        for name, size in (("i", rows), ("j", 8))
    ]
    return embedding_of(*configs, optimizer=optimizer, cache=25)


def train(model: TableBatchedEmbedding, steps: range) -> TableBatchedEmbedding:
    """Runs training steps with eight lookups of each table, with ids below the table's size."""
    for step in steps:
        random = np.random.default_rng(step)
        ids = [torch.from_numpy(random.integers(0, table.num_embeddings, 8)) for table in model.tables]
        model(torch.cat(ids), torch.arange(0, 17, 2)).square().sum().backward()
    return model


@pytest.mark.parametrize("full", [False, True], ids=["delta", "full"])
@pytest.mark.parametrize("optimizer", [ADAGRAD, WINDOWS], ids=["rows", "windows"])
@pytest.mark.parametrize("rows", [1, 23, 59, 61, 200])
def test_tables_of_different_size_share_rows(rows: int, optimizer: Any, full: bool, tmp_path: Path) -> None:
    """The rows in both sizes are loaded. Rows that are left out are left out with their pending gradients."""
    source = train(of_sizes(60, optimizer), range(3))
    if not full:
        save(source, tmp_path)
    delta(train(source, range(3, 5)), tmp_path)
    target = train(of_sizes(rows, optimizer), range(70, 73))  # the load replaces these rows
    then = "the others begin anew" if rows > 60 else "the others are left out"
    message = f"'i' has num_embeddings {rows}, what is loaded 60: {min(rows, 60)} .*{then}"
    with pytest.warns(UserWarning, match=message) as said:
        loaded(tmp_path, target)
    assert len(said) == 1
    before, after, new = map(contents, (source, target, of_sizes(rows, optimizer)))
    for name in ("i", "i.window"):
        expected = {i: row for i, row in before[name].items() if i < rows}
        assert after.pop(name) == expected | {i: row for i, row in new[name].items() if i >= 60}
        del before[name]
    assert after == before
    train(target, range(80, 83))


@pytest.mark.filterwarnings("ignore:table 'i' has num_embeddings")
@pytest.mark.parametrize("rows", [23, 200])
def test_a_delta_does_not_follow_a_save_of_another_size(rows: int, tmp_path: Path) -> None:
    save(train(of_sizes(), range(3)), tmp_path)
    target = loaded(tmp_path, of_sizes(rows))
    kinds = [written(train(target, range(step, step + 1)), tmp_path).kind for step in range(2)]
    assert kinds == [FULL, DELTA]
    assert_same(loaded(tmp_path, of_sizes(rows)), target)


def test_ids_of_a_hash_table_are_not_left_out(tmp_path: Path) -> None:
    """Ids are not row numbers: a hash table with larger ids cannot become a smaller index table."""
    save(train(of_sizes(hashed=True), range(9)), tmp_path)
    refused(of_sizes(23), tmp_path, "are out of range for the index table 'i', which has num_embeddings 23")
