"""A timer's signals at random moments of a training with everything: what is left is always some moment of it.

The reference is the numpy training in tests/interrupting.py. After an interrupt a step counts or does not, for all
tables of all groups; nothing in between.
"""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from interrupting import Change, Interrupt, Moment, Possible, handler
from jagged import apply, bag_config, bags_collection, jagged
from torchrec import EmbeddingBagConfig

import rec_sdk_torch as rst

ROWS = 24
CACHE = 5
TABLES = ("t0", "t1", "t2")
HASHED = (True, False, True)
DIMS = (4, 8, 16)
ACTIONS = ("train", "train", "train", "train", "read", "save", "load", "learning rate")


class SavedState(NamedTuple):
    weights: dict[str, Any]
    states: dict[str, Any]


class Training:
    """A collection of three groups, and what the reference says of it."""

    def __init__(self, device: torch.device, window: int, seed: int) -> None:
        self.device, self.window = device, window
        self.rng = np.random.default_rng(seed)
        self.ids = [np.arange(ROWS) * (104729 if hashed else 1) for hashed in HASHED]
        self.durations: dict[str, float] = {}
        self.start()

    def start(self) -> None:
        index = EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=DIMS[1], name="t1", feature_names=["f1"])
        tables = [bag_config("t0", ("f0",)), index, bag_config("t2", ("f2",), embedding_dim=DIMS[2])]
        self.collection = bags_collection(self.device, *tables, cache=CACHE)
        if self.window == 1:
            apply(self.collection, torch.optim.Adagrad, **Moment.OPTIONS)
        else:
            options = {"use_accumulate": True, "accumulate_step": self.window, **Moment.OPTIONS}
            apply(self.collection, rst.AccumulateAdagrad, **options)
        self.initial = self.rows()
        self.possible = Possible([Moment.start(self.initial, HASHED)])
        self.saved: list[tuple[SavedState, Moment]] = []

    def rows(self) -> tuple[np.ndarray, ...]:
        """Every row of every table."""
        batch = jagged({f"f{n}": [[int(i)] for i in ids] for n, ids in enumerate(self.ids)})
        with torch.no_grad():
            values = self.collection(batch).values().cpu()
        return tuple(part.numpy() for part in values.split(DIMS, dim=1))

    def look(self) -> None:
        """Compares rows, ids, states and t with the reference."""
        known = tuple(np.isin(ids, self.collection.table_ids(name)) for ids, name in zip(self.ids, TABLES, strict=True))
        states = self.collection.fused_optimizer.state_dict()["state"]
        sums, steps = self.states_of(states)
        assert len(steps) == 1, f"steps {steps}"
        self.possible.look(Moment(self.rows(), known, sums, t=steps.pop()))

    def states_of(self, states: dict[str, Any]) -> tuple[tuple[np.ndarray, ...], set[int]]:
        """Adagrad's sums of every row, and the steps of all tables."""
        found = []
        for ids, table, dim in zip(self.ids, TABLES, DIMS, strict=True):
            values = states[f"embedding_bags.{table}.weight"]
            every = np.zeros((ROWS, dim), np.float32)
            known = values.get(f"{table}.ids", torch.arange(ROWS)).numpy()
            every[np.searchsorted(ids, known)] = values[f"{table}.momentum1"].numpy()
            found.append(every)
        return tuple(found), {int(states[f"embedding_bags.{table}.weight"][f"{table}.step"]) for table in TABLES}

    # ---- actions: what is called, and what it changes

    def action(self, name: str) -> tuple[Callable[[], object], tuple[Change, ...]]:
        if name == "train":
            return self.train()
        if name == "load" and self.saved:
            return self.load(*self.saved[int(self.rng.integers(len(self.saved)))])
        if name == "learning rate":
            lr = float(self.rng.choice([0.5, 0.25, 0.1]))
            return lambda: self.collection.fused_optimizer.param_groups[0].update(lr=lr), ()
        return (self.rows if name == "read" else self.save), ()

    def train(self) -> tuple[Callable[[], object], tuple[Change, ...]]:
        lookups = [self.rng.choice(self.rng.choice(ROWS, CACHE, replace=False), 7) for _ in TABLES]
        ids = [every[rows] for every, rows in zip(self.ids, lookups, strict=True)]
        batch = jagged({f"f{n}": [[int(i)] for i in table] for n, table in enumerate(ids)})
        lr = self.collection.fused_optimizer.param_groups[0]["lr"]
        changes = (lambda m: m.forward(lookups), lambda m: m.backward(lookups, lr, self.window))
        return lambda: self.collection(batch).values().sum().backward(), changes

    def save(self) -> SavedState:
        return SavedState(dict(self.collection.state_dict()), self.collection.fused_optimizer.state_dict())

    def keep(self, save: SavedState) -> None:
        """A save that was finished: the moment that it is of, by what it says itself."""
        found, known = [], []
        for ids, initial, table in zip(self.ids, self.initial, TABLES, strict=True):
            values, there = initial.copy(), np.full(ROWS, False)
            saved = save.weights.get(f"embedding_bags.{table}.ids", torch.arange(ROWS)).numpy()
            places = np.searchsorted(ids, saved)
            values[places], there[places] = save.weights[f"embedding_bags.{table}.weight"].numpy(), True
            found.append(values)
            known.append(there)
        sums, steps = self.states_of(save.states["state"])
        moment = Moment(tuple(found), tuple(known), sums, t=steps.pop())
        assert not steps
        differences = [possible.difference(moment) for possible in self.possible.moments]
        assert not all(differences), f"a save: {differences}"
        self.saved = [*self.saved[-3:], (save, moment)]

    def load(self, save: SavedState, saved: Moment) -> tuple[Callable[[], object], tuple[Change, ...]]:
        def call() -> None:
            self.collection.load_state_dict(save.weights)
            self.collection.fused_optimizer.load_state_dict(save.states)

        def with_weights(m: Moment) -> Moment:
            """Rows that stay keep their states, the window is dropped."""
            stay = [a & b for a, b in zip(m.known, saved.known, strict=True)]
            sums = tuple(np.where(s[:, None], old, 0).astype(np.float32) for s, old in zip(stay, m.sums, strict=True))
            zeros = tuple(np.zeros_like(p) for p in m.pending)
            return replace(m, weights=saved.weights, known=saved.known, sums=sums, pending=zeros, backwards=0)

        return call, (with_weights, lambda m: replace(m, sums=saved.sums, t=saved.t))

    # ---- with a timer

    def run(self, name: str, *, timer: bool = True) -> bool:
        """Runs an action, with a timer on; whether that interrupted it."""
        call, changes = self.action(name)
        done, result = False, None
        delay = max(1e-6, float(self.rng.uniform(0.1, 1.3)) * self.durations.get(name, 1e-3))
        begin = time.perf_counter()
        gc.disable()  # what it calls swallows exceptions, and pytest keeps those, with the frames below them
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, delay if timer else 0)
                result = call()
                done = True
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            self.durations[name] = 0.8 * self.durations.get(name, 1e-3) + 0.2 * (time.perf_counter() - begin)
        except Interrupt:
            pass
        gc.enable()
        if done:
            self.possible.did(name, *changes)
        else:
            self.possible.may_have_done(name, *changes)
            gc.collect(1)  # frames of the exception, with the batch's pins
            torch.set_grad_enabled(True)  # torch.no_grad is written in Python, and may be left half-way
        self.look()
        if isinstance(result, SavedState):
            self.keep(result)
        return not done


@pytest.mark.parametrize("window", [1, 3])
def test_reference(device: torch.device, window: int) -> None:
    """Without interrupts, the numpy training and the collection agree bit for bit."""
    training = Training(device, window, seed=0)
    for _ in range(150):
        assert not training.run(str(training.rng.choice(ACTIONS)), timer=False)
        assert len(training.possible.moments) == 1


@pytest.mark.parametrize(("strikes", "seed"), [(100, 0), pytest.param(1000, None, marks=pytest.mark.full)])
@pytest.mark.parametrize("window", [1, 3])
def test_interrupts_at_any_time(device: torch.device, window: int, strikes: int, seed: int | None) -> None:
    """An embedding that an interrupt has left unusable says so when it is used next, and is made anew here."""
    seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    training = Training(device, window, seed)
    struck = 0
    refused: list[str] = []
    with handler(signal.SIGALRM):
        while struck < strikes:
            name = str(training.rng.choice(ACTIONS))
            try:
                struck += training.run(name)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, after {struck} interrupts, {name}: {error}") from error
            except RuntimeError as error:
                if "interrupt" not in str(error):
                    raise AssertionError(f"seed {seed}, after {struck} interrupts, {name}: {error!r}") from error
                refused.append(str(error))
                training.start()
    assert len(refused) <= strikes // 4, f"{len(refused)} of {strikes} interrupts: {refused[:3]}"
