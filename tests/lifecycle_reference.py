"""Reference for admission and eviction of ids in one table, in plain Python; docs/admission_eviction.md states
the rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from coin_reference import Coin
from hypothesis import strategies as st
from sketch_reference import Sketch, least_admitted_count

from rec_sdk_torch import rules
from rec_sdk_torch.rules.rule import Admission
from rec_sdk_torch.tbe import EvictReason, TableLifecycle

NEVER = -(2**63)
MOST = 2**32 - 1
"""The maximal count."""
DIGITS = [2.0**-1]
for _ in range(56):
    DIGITS.append(math.sqrt(DIGITS[-1]))
MOST_AHEAD = 10 * 365 * 24 * 60 * 60


def decayed(score: float, batches: int, half_life: int) -> float:
    """Computes `score / 2 ** (batches / half_life)`, eight bits of the exponent at a time, the highest first."""
    part = (batches % half_life << 56) // half_life
    for begin in range(0, 56, 8):
        factor = 1.0
        for digit in range(begin, begin + 8):
            if part >> (55 - digit) & 1:
                factor *= DIGITS[digit + 1]
        score *= factor
    return math.ldexp(score, -min(batches // half_life, 3000))


@dataclass
class IdCounts:
    """The counters of an id, with or without a row."""

    count: int = 0
    clicks: int = 0
    timestamp: int = 0
    last_use: int = 0
    score: float = 0.0


@dataclass
class LifecycleReference:
    """The lifecycle state of a table: `rows` and `candidates` by id."""

    rules: TableLifecycle
    rows: dict[int, IdCounts] = field(default_factory=dict)
    candidates: dict[int, IdCounts] = field(default_factory=dict)
    batches: int = 0
    steps: int = 0
    latest: int = NEVER
    most: int = 0  # timestamps above this are ignored
    waiting: set[int] = field(default_factory=set)  # rows with gradients in the accumulation buffer
    evicted: int = 0
    reasons: dict[int, EvictReason] = field(default_factory=dict)  # reasons for the evictions of the last step
    sketch: Sketch | None = None  # if present, counts ids without a row instead of `candidates`
    coin: Coin | None = None

    def __post_init__(self) -> None:
        self.admission, self.score = self.rules.admission, self.rules.score or rules.Score()
        bound = self.rules.rule(rules.Rows)
        self.most_rows = bound.most if bound is not None else 0
        if isinstance(self.admission, rules.Sketch):
            size, least = self.admission.bytes, least_admitted_count(self.admission.threshold, self.admission.alpha)
            self.sketch = Sketch(size, self.admission.depth, least)

    def value(self, one: IdCounts) -> float:
        return self.score.alpha * one.count + self.score.beta * one.clicks

    def admission_score(self, one: IdCounts) -> float:
        """Returns the weighted sum that is compared with the threshold of admission."""
        alpha, beta = getattr(self.admission, "alpha", 1.0), getattr(self.admission, "beta", 0.0)
        return alpha * one.count + beta * one.clicks

    def admitted(self, one: IdCounts) -> bool:
        """Returns whether a candidate gets a row.

        Any random draws for admission by probability were made before this call.
        """
        chance = isinstance(self.admission, (rules.Probability, type(None)))
        return chance or self.admission_score(one) >= self.admission.threshold

    def decayed_score(self, one: IdCounts, now: int) -> float:
        """Returns the decayed score in batch `now`."""
        half_life = self.score.half_life
        return decayed(one.score, now - one.last_use, half_life) if half_life else one.score

    def advance_clock(self, timestamps: list[int]) -> None:
        """Advances the clock to the latest timestamp of a batch, ignoring timestamps far ahead of most others."""
        earliest = min(timestamps, default=NEVER)
        while 2 * sum(each <= earliest + MOST_AHEAD for each in timestamps) < len(timestamps):
            earliest = min(each for each in timestamps if each > earliest + MOST_AHEAD)
        self.most = (earliest if self.latest == NEVER else self.latest) + MOST_AHEAD
        self.latest = max([self.latest, *(each for each in timestamps if each <= self.most)])

    def batch(self, ids: np.ndarray, clicks: np.ndarray, timestamps: np.ndarray, *, seen: bool = False) -> None:
        """Counts the ids of a training batch, lookup by lookup in order.

        Args:
            ids: the ids.
            clicks: a click count per id.
            timestamps: a timestamp per id.
            seen: whether `see` was already called for this batch, with more timestamps than these.
        """
        self.batches += 1
        if not seen:
            self.advance_clock(timestamps.tolist())
        before = {i: IdCounts(**vars(one)) for i, one in self.rows.items()}
        for i, click, timestamp in zip(ids.tolist(), clicks.tolist(), timestamps.tolist(), strict=True):
            one = self.rows[i] if i in self.rows else self.candidates.setdefault(i, IdCounts())
            one.count += 1
            one.clicks += click
            one.timestamp = timestamp if timestamp <= self.most else self.latest
            one.last_use = self.batches
        if self.sketch is not None:
            self._replace_candidates(self.sketch, ids.tolist())
        if isinstance(self.admission, rules.Probability):
            assert self.coin is not None
            chance = self.admission.probability
            self.candidates = {i: one for i, one in self.candidates.items() if self.coin.toss(i, self.batches, chance)}
        for i in set(ids.tolist()):
            one = self.rows[i] if i in self.rows else self.candidates.get(i, IdCounts())
            whole = IdCounts(one.count, one.clicks)
            one.count, one.clicks = min(one.count, MOST), min(one.clicks, MOST)
            if i in self.rows and self.score.half_life:
                was = before[i]
                added = IdCounts(whole.count - was.count, whole.clicks - was.clicks)
                one.score = self.decayed_score(was, self.batches) + self.value(added)
            elif i in self.rows:
                self.rows[i].score = (self.rows[i].score + self.value(self.rows[i])) * self.score.decay
            elif i in self.candidates and self.admitted(self.candidates[i]):
                self.rows[i] = self.candidates.pop(i)
                self.rows[i].score = self.value(self.rows[i])

    def _replace_candidates(self, sketch: Sketch, ids: list[int]) -> None:
        """Removes candidates that the sketch does not admit; admitted ids get the sketch's counts."""
        for i in ids:
            if i in self.candidates:
                sketch.add(i)
        for i, one in list(self.candidates.items()):
            count = sketch.estimate(i)
            one.count = max(one.count, count)
            if not self.admitted(IdCounts(count)):
                del self.candidates[i]

    def _overdue(self, one: IdCounts) -> EvictReason | None:
        age, idle = self.rules.rule(rules.Age), self.rules.rule(rules.Idle)
        if age and self.latest - one.timestamp > age.seconds:
            return EvictReason.AGE
        return EvictReason.IDLE if idle and self.batches - one.last_use >= idle.batches else None

    def _over_bound(self, all_of: dict[int, IdCounts], leaving: set[int], held: set[int], by_score: bool) -> set[int]:
        """Returns the ids to evict, lowest scores first, so that at most `max_rows` rows remain."""
        most, staying = self.most_rows, [i for i in all_of if i not in leaving or i in held]
        if not most or len(staying) <= most:
            return set()

        def worth(i: int) -> tuple[float, int, int]:
            one = all_of[i]
            return (self.decayed_score(one, self.batches) if by_score else self.admission_score(one)), one.last_use, i

        free = sorted((i for i in staying if i not in held), key=worth)
        return set(free[: len(staying) - (most - most // 8)])

    def end_step(self, in_flight: set[int]) -> list[int]:
        """Ends a training step; returns the evicted ids. `in_flight`: ids of batches whose update is still to come."""
        self.steps += 1
        interval, share = self.rules.every, self.rules.rule(rules.Share)
        ends = bool(interval) and self.steps % interval == 0
        held = in_flight | self.waiting
        rows: set[int] = set()
        candidates: set[int] = set()
        reasons: dict[int, EvictReason] = {}
        if ends:
            reasons = {i: why for i, one in self.rows.items() if (why := self._overdue(one)) is not None}
            rows = set(reasons)
            candidates = {i for i, one in self.candidates.items() if self._overdue(one) is not None}
            if share is not None and self.rows:
                count = max(1, int(len(self.rows) * share.share))
                lowest = sorted(self.rows, key=lambda i: (self.decayed_score(self.rows[i], self.batches), i))[:count]
                reasons = dict.fromkeys(lowest, EvictReason.SCORE) | reasons
                rows |= set(lowest)
        # The bound is checked when it is exceeded, or together with the other rules.
        if ends or (self.most_rows and max(len(self.rows), len(self.candidates)) > self.most_rows):
            by_count = {i: IdCounts(count=one.count, last_use=one.last_use) for i, one in self.rows.items()}
            scored = self.rules.score is not None
            beyond = self if scored else LifecycleReference(TableLifecycle(bound=self.rules.bound), by_count)
            rows |= beyond._over_bound(self.rows if scored else by_count, rows, held, scored)
            candidates |= self._over_bound(self.candidates, candidates, set(), False)
        evicted = sorted(rows - held)
        self.reasons = {i: reasons.get(i, EvictReason.BOUND) for i in evicted}
        for i in evicted:
            del self.rows[i]
        for i in candidates:
            del self.candidates[i]
        self.evicted += len(evicted)
        halve_after = getattr(self.admission, "halve_after", 0)
        if self.sketch is not None and 0 < halve_after <= self.sketch.counted:
            self.sketch.halve()
        return evicted

    def columns(self, of: dict[int, IdCounts], ids: Iterable[int], names: Iterable[str]) -> dict[str, list[float]]:
        return {name: [getattr(of[i], name) for i in ids] for name in names}


@st.composite
def lifecycles(draw: st.DrawFn) -> TableLifecycle | None:
    """Draws a random mixture of rules; None for half of the tables."""
    if draw(st.booleans()):
        return None
    share, most = draw(st.sampled_from((0.0, 0.0, 0.25))), draw(st.sampled_from((0, 0, 5, 20)))
    scored = share or (most and draw(st.booleans()))
    alpha, beta = draw(st.sampled_from((1.0, 0.5))), draw(st.sampled_from((0.0, 0.75)))
    half_life = draw(st.sampled_from((0, 1, 3, 10**6)))
    decay = 1.0 if half_life else draw(st.sampled_from((1.0, 0.5)))
    threshold = draw(st.sampled_from((1.0, 2.0, 3.0, 4.5)))
    ways: list[st.SearchStrategy[Admission | None]] = [
        st.none(),
        st.just(rules.ShowClick(threshold, alpha, beta)),
        st.builds(rules.Probability, st.sampled_from((0.3, 1.0))),
    ]
    if not beta:
        shapes = st.sampled_from((12, 64, 2000)), st.sampled_from((1, 4)), st.sampled_from((0, 30))
        ways.append(st.builds(rules.Sketch, st.just(threshold), *shapes, st.just(alpha)))
    if not scored or (alpha, beta) == (1, 0):
        ways.append(st.just(rules.Count(threshold)))
    age, idle = draw(st.sampled_from((0, 3))), draw(st.sampled_from((0, 0, 2, 4)))
    norm = draw(st.sampled_from((0.0,) * 7 + (0.6,)))
    numbers: dict[Any, float] = {rules.Age: age, rules.Idle: idle, rules.Norm: norm, rules.Share: share}
    return TableLifecycle(
        admission=draw(st.one_of(ways)),
        eviction=[kind(number) for kind, number in numbers.items() if number],
        every=draw(st.integers(0, 3)),
        bound=[rules.Rows(most)] if most else [],
        score=rules.Score(alpha, beta, decay, half_life) if scored else None,
        keep_evicted=draw(st.booleans()),
        default_value=0.25,
    )
