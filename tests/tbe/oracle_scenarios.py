"""Random scenarios of the oracle: tables, batches, and the event of each step."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from lifecycle_reference import lifecycles
from optimizer_table import BY_NAME

from rec_sdk_torch import _engine
from rec_sdk_torch.tbe import InitializerType, Pooling, TableConfig, TableOptimizer

STEPS = 20
BATCH = 4
DIMS = (1, 3, 8, 20, 64, 130)
KINDS = ("mixed", "mixed", "mixed", "empty", "one id", "all the same", "all new", "extremes", "hot")
EVENTS = ("train", "train", "train", "train", "eval", "abandon", "overlap", "fail", "warm", "leave", "fill")
WITHOUT_FORWARD = ("fail", "save", "load", "warm", "leave", "fill")

STORES = tempfile.TemporaryDirectory(prefix="rec_sdk_oracle")
"""Folders of host stores on disk, each used by one embedding."""


@dataclass
class Step:
    """One batch: `features[f][b]` are the ids of bag b of feature f; `weights`, `clicks` and `timestamps` are
    nested alike.
    """

    event: str
    lr: float
    features: list[list[np.ndarray]]
    weights: list[list[torch.Tensor]] | None
    grads: list[torch.Tensor] = field(default_factory=list)
    clicks: list[list[np.ndarray]] = field(default_factory=list)
    timestamps: list[list[np.ndarray]] = field(default_factory=list)

    @property
    def trains(self) -> bool:
        return self.event in ("train", "overlap", "abandon")


@dataclass
class Scenario:
    """A scenario drawn by hypothesis. Batches are derived from its seed, so a failing scenario prints in one line."""

    tables: list[TableConfig]
    optimizer: str
    window: int
    max_gradient: float
    weighted: bool
    events: list[str]
    policy: str
    seed: int
    depth: int = 0
    on_disk: bool = False
    rounded: torch.dtype | None = None
    frozen: str | None = None
    """Name of a frozen table, which is looked up but not trained."""
    narrow: bool = False
    """Whether optimizer states, except counters, are 16 bits wide."""
    update: str = "backward"
    max_norm: float = float("inf")
    """The norm by which step() clips the gradients of `window` backward passes; finite with update="step" alone."""

    @property
    def accumulates(self) -> bool:
        """Whether the optimizer has an accumulation buffer."""
        return self.window > 1 and self.update == "backward"

    def clipped(self) -> Scenario:
        """Returns a copy without rules; step() follows at least two backward passes and clips by the total norm."""
        tables = [replace(table, lifecycle=None) for table in self.tables]
        bounds = {"max_norm": float(1 + self.seed % 20), "max_gradient": float("inf")}
        return replace(self, tables=tables, update="step", window=max(2, self.window), **bounds)

    def varied(self, **fields: Any) -> Scenario:
        """Returns a copy with these fields replaced and the same batches."""
        other = replace(self, **fields)
        other.steps = self.steps
        return other

    def with_other_update(self) -> Scenario:
        """Returns a copy with the other value of `update`.

        If a window has more than one backward pass, the two differ; then returns the scenario itself.
        """
        if self.window > 1:
            return self
        return self.varied(update="step" if self.update == "backward" else "backward")

    def with_rounding(self, stored: torch.dtype | None = None) -> Scenario:
        """Returns a copy with stochastically rounded weights and 16-bit states.

        Args:
            stored: dtype of the weights in the host store; by default the cache's.
        """
        assert self.rounded is not None
        types = {"weight_dtype": stored or self.rounded, "cache_dtype": self.rounded, "stochastic_rounding": True}
        tables = [replace(table, **types) for table in self.tables]
        return self.varied(tables=tables, narrow=True)

    def state_dtypes(self, optimizer: TableOptimizer) -> dict[str, torch.dtype]:
        """Returns a 16-bit dtype for each state of `optimizer`, and different ones if it has two states."""
        kinds = (torch.bfloat16, torch.float16) if self.seed % 2 else (torch.float16, torch.bfloat16)
        states = [state.name for state in optimizer.spec.states if not state.counter]
        return dict(zip(states, kinds, strict=False))

    @cached_property
    def steps(self) -> list[Step]:
        rng = np.random.default_rng(self.seed)
        steps = [draw_step(rng, self.tables, i, event, self.weighted) for i, event in enumerate(self.events)]
        for i, step in enumerate(steps):  # drawn labels of -1 are clipped to 0: no click
            step.clicks = [[rng.integers(-1, 3, len(bag)).clip(0) for bag in f] for f in step.features]
            step.timestamps = [[i + rng.integers(-3, 3, len(bag)) for bag in f] for f in step.features]
            for bag in (bag for f in step.timestamps for bag in f):
                if rng.random() < 0.05:
                    bag[:1] *= 10**12  # a timestamp in another unit
        return steps

    @property
    def sequence(self) -> bool:
        return self.tables[0].pooling is Pooling.NONE

    @property
    def joined(self) -> bool:
        """Whether the features of a sequence share one output, with one gradient."""
        return self.sequence and len({table.embedding_dim for table in self.tables}) == 1 and self.seed % 2 == 0

    @property
    def counts(self) -> bool:
        """Whether gradient norms are counted and compared."""
        return self.seed % 5 > 1 and self.max_norm == float("inf")

    @property
    def one_launch(self) -> bool:
        """Whether the cache swaps and looks up rows in one operator call, as on an NPU."""
        return self.seed % 3 > 0

    def overwrites(self, index: int) -> bool:
        """Returns whether `put_back` in a step overwrites rows that the table has for the same ids."""
        return (self.seed + index) % 2 == 0

    def actions(self) -> Iterator[tuple[int, list[int]]]:
        """Yields (step to run forward, steps whose backward follows), in order.

        The backward pass of an "overlap" step runs after the next training step's forward, so both batches pin rows.
        """
        waiting: list[int] = []
        for index, event in enumerate(self.events):
            if event in ("train", "overlap"):
                waiting.append(index)
            last = index + 1 == len(self.events)
            ready = last or event == "train" or len(waiting) == 2
            yield index, waiting if ready else []
            if ready:
                waiting = []

    def features_of(self, table: int) -> slice:
        begin = sum(t.num_features for t in self.tables[:table])
        return slice(begin, begin + self.tables[table].num_features)

    def removed(self, table: int, index: int) -> list[int]:
        """Returns the ids that are removed in a step: some of the step's own ids."""
        return sorted(self.ids(table, self.steps[index]))[index % 3 :: 3]

    def ids(self, table: int, step: Step) -> set[int]:
        every = {int(i) for feature in step.features[self.features_of(table)] for bag in feature for i in bag}
        return every - {self.tables[table].padding_idx}


def draw_ids(rng: np.random.Generator, table: TableConfig, kind: str, step: int, length: int) -> np.ndarray:
    ids = draw_unpadded_ids(rng, table, kind, step, length)
    return ids if table.padding_idx is None else np.where(rng.random(length) < 0.2, table.padding_idx, ids)


def draw_unpadded_ids(rng: np.random.Generator, table: TableConfig, kind: str, step: int, length: int) -> np.ndarray:
    if not table.hashed:
        top = table.num_embeddings
        pool = {"one id": 1, "all the same": 1, "hot": 2}.get(kind, top)
        return rng.integers(0, pool, length) if kind != "extremes" else rng.choice([0, top - 1], length)
    if kind == "all new":
        return 1_000_000 * (step + 1) + rng.integers(0, 1000, length)
    if kind == "extremes":
        return rng.choice(np.array([-(2**63), 2**63 - 1, -1, 0, 1, -(2**62)]), length)
    if kind == "all the same":
        return np.full(length, -7)
    return rng.integers(-15, 15, length) if kind != "hot" else rng.integers(0, 2, length)


def draw_step(rng: np.random.Generator, tables: list[TableConfig], step: int, event: str, weighted: bool) -> Step:
    kind = str(rng.choice(KINDS))
    features: list[list[np.ndarray]] = []
    for table in tables:
        for _ in range(table.num_features):
            longest = {"empty": 0, "one id": 1, "hot": 60}.get(kind, 5)
            lengths = rng.integers(0, longest + 1, BATCH)
            if kind == "one id":
                lengths[1:] = 0
            features.append([draw_ids(rng, table, kind, step, int(n)).astype(np.int64) for n in lengths])
    weights = None
    if weighted:
        weights = [[torch.from_numpy(rng.normal(size=len(b)).astype(np.float32)) for b in f] for f in features]
    sequence = tables[0].pooling is Pooling.NONE
    dims = [t.embedding_dim for t in tables for _ in range(t.num_features)]
    rows = [sum(map(len, f)) if sequence else BATCH for f in features]
    grads = [torch.from_numpy(rng.normal(size=(n, d)).astype(np.float32)) for n, d in zip(rows, dims, strict=True)]
    return Step(event, float(rng.uniform(0.01, 0.3)), features, weights, grads)


@st.composite
def scenarios(draw: st.DrawFn, events: tuple[str, ...] = EVENTS, depths: tuple[int, int] = (0, 0)) -> Scenario:
    sequence = draw(st.booleans())
    same_dim = draw(st.sampled_from(DIMS))
    tables = []
    for index in range(draw(st.integers(1, 3))):
        pooling = Pooling.NONE if sequence else draw(st.sampled_from((Pooling.SUM, Pooling.MEAN)))
        hashed = draw(st.booleans())
        tables.append(
            TableConfig(
                name=f"t{index}",
                num_embeddings=40 if hashed else 12,
                embedding_dim=draw(st.sampled_from((same_dim, *DIMS))),
                num_features=draw(st.integers(1, 2)),
                pooling=pooling,
                hashed=hashed,
                lifecycle=draw(lifecycles()) if hashed else None,
                padding_idx=draw(st.sampled_from((None, None, None, 1, -7, 2**63 - 1))),
                initializer_type=draw(st.sampled_from(InitializerType)),
                init_min=-0.5,
                init_max=0.5,
            )
        )
    optimizer = draw(st.sampled_from(sorted(BY_NAME)))
    window = draw(st.integers(1, 4)) if BY_NAME[optimizer].spec.accumulate_class else 1
    weighted = not sequence and draw(st.booleans())
    clip = draw(st.sampled_from((float("inf"), 0.7)))
    drawn = draw(st.lists(st.sampled_from(events), min_size=STEPS, max_size=STEPS))
    policy = draw(st.sampled_from(_engine.cache_policies()))
    seed = draw(st.integers(0, 2**32 - 1))
    depth, on_disk = draw(st.integers(*depths)), draw(st.booleans())
    rounded = draw(st.sampled_from((None, None, None, torch.bfloat16, torch.float16)))
    frozen = draw(st.sampled_from((None, None, None, "t0", "t1"))) if len(tables) > 1 else None
    update = draw(st.sampled_from(("backward", "step"))) if window == 1 else "backward"
    return Scenario(
        tables, optimizer, window, clip, weighted, drawn, policy, seed, depth, on_disk, rounded, frozen, update=update
    )
