"""Rules of admission and eviction: arguments, columns and former fields of `TableLifecycle`."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import rec_sdk_torch as rst
from rec_sdk_torch import TableLifecycle, rules
from rec_sdk_torch.rules import Age, Bytes, Count, Idle, Norm, Probability, Rows, Score, Share, ShowClick, Sketch
from rec_sdk_torch.rules.flat_options import OPTIONS
from rec_sdk_torch.rules.rule import Rule

EVERY = (
    TableLifecycle(admission=Count(2)),
    TableLifecycle(admission=ShowClick(2, beta=3)),
    TableLifecycle(admission=Sketch(2, bytes=64)),
    TableLifecycle(admission=Probability(0.5)),
    TableLifecycle(eviction=Age(5)),
    TableLifecycle(eviction=Idle(5)),
    TableLifecycle(eviction=Norm(0.5)),
    TableLifecycle(eviction=Share(0.5), score=Score(beta=2)),
    TableLifecycle(bound=Rows(5)),
    TableLifecycle(bound=Bytes(80)),
)


def test_every_rule_is_tested_here_and_documented() -> None:
    named = {each for each in vars(rules).values() if isinstance(each, type) and issubclass(each, Rule)}
    assert {type(rule) for lifecycle in EVERY for rule in lifecycle.rules} == named
    assert {lifecycle.to_engine(16).__class__.__name__ for lifecycle in EVERY} == {"Rules"}, (
        "the engine knows each of them"
    )
    page = (Path(__file__).resolve().parents[2] / "docs/api/tbe.md").read_text()
    for name in (each.__name__ for each in named):
        assert f"`{name}`" in (TableLifecycle.__doc__ or "")
        assert f":: rec_sdk_torch.rules.{name}\n" in page


COLUMNS: list[tuple[TableLifecycle, list[str]]] = [
    (TableLifecycle(admission=ShowClick(2, beta=3)), []),
    (TableLifecycle(eviction=Age(5)), ["timestamp"]),
    (TableLifecycle(eviction=Idle(5)), ["last_use"]),
    (TableLifecycle(eviction=Norm(5)), []),
    (TableLifecycle(eviction=Share(0.5)), ["count", "score"]),
    (TableLifecycle(eviction=Share(0.5), score=Score(beta=1)), ["count", "score", "clicks"]),
    (TableLifecycle(eviction=Share(0.5), score=Score(half_life=3)), ["count", "last_use", "score"]),
    (TableLifecycle(bound=Rows(5)), ["count", "last_use"]),
    (TableLifecycle(bound=Bytes(5), eviction=[Age(5), Idle(4)]), ["count", "last_use", "timestamp"]),
    (TableLifecycle(bound=Rows(5), score=Score(beta=1), eviction=Age(3)), list(rules.COLUMNS)),
]


@pytest.mark.parametrize(("lifecycle", "columns"), COLUMNS, ids=[str(columns) for _, columns in COLUMNS])
def test_columns_are_the_sum_over_the_rules(lifecycle: TableLifecycle, columns: list[str]) -> None:
    assert lifecycle.columns() == columns


def test_one_rule_or_a_list_in_any_order() -> None:
    assert TableLifecycle(eviction=Age(5)) == TableLifecycle(eviction=[Age(5)])
    assert TableLifecycle(eviction=[Share(0.5), Age(5)]) == TableLifecycle(eviction=(Age(5), Share(0.5)), score=Score())
    assert hash(TableLifecycle(bound=[Rows(5), Bytes(9)])) == hash(TableLifecycle(bound=[Bytes(9), Rows(5)]))


def test_limits_are_divided_among_ranks() -> None:
    lifecycle = TableLifecycle(
        admission=Sketch(2, bytes=64, halve_after=30), eviction=Idle(9), bound=[Rows(8), Bytes(90)], every=4
    )
    part = TableLifecycle(
        admission=Sketch(2, bytes=32, halve_after=15), eviction=Idle(9), bound=[Rows(4), Bytes(45)], every=4
    )
    assert lifecycle.part(lambda number: number // 2) == part


any_of: Any = TableLifecycle  # accepts wrong types
WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "an eviction as admission": (
        lambda: any_of(admission=Idle(5)),
        TypeError,
        r"admission is Idle\(batches=5\), expected .*ShowClick",
    ),
    "two admissions": (lambda: any_of(admission=[Count(3), Probability(0.5)]), TypeError, "admission is .Count"),
    "two of one class": (
        lambda: any_of(eviction=[Age(3), Age(4)]),
        TypeError,
        "expected .*Share.*, each once",
    ),
    "a number as bound": (lambda: any_of(bound=7), TypeError, "bound is 7, expected .*Bytes.*, each once"),
    "a class as rule": (lambda: any_of(eviction=Age), TypeError, "eviction is <class"),
    "a score that nothing reads": (lambda: any_of(score=Score(half_life=3)), TypeError, "no rule uses Score"),
    "two ways to decay": (lambda: Score(decay=0.5, half_life=2), ValueError, "half_life is 2 beside decay 0.5"),
    "no flag": (lambda: any_of(keep_evicted=1), TypeError, "keep_evicted is 1, expected a bool"),
    "no interval": (
        lambda: any_of(every=-1),
        ValueError,
        "TableLifecycle: every is -1, must be at least 0 and below 2.63",
    ),
    "a half": (lambda: Idle(2.5), TypeError, "Idle: batches is 2.5, expected an int"),  # type: ignore[arg-type]
    "a negative half-life": (lambda: Score(half_life=-1), ValueError, "half_life is -1, must be at least 0"),
    "too many": (lambda: Rows(2**63), ValueError, "most is 9223372036854775808, must be .* below 2.63"),
    "no bytes": (lambda: Sketch(2, bytes=-1), ValueError, "Sketch: bytes is -1, must be at least 1"),
    "no cells": (lambda: Sketch(2, bytes=9, depth=0), ValueError, "depth is 0, must be at least 1 and at most 16"),
    "many cells": (lambda: Sketch(2, bytes=9, depth=17), ValueError, "depth is 17, must be at least 1 and at most 16"),
    "no weight": (lambda: Sketch(2, bytes=9, alpha=0), ValueError, r"alpha is 0, must be finite and in \(0, inf\]"),
    "a share": (lambda: Share(1.5), ValueError, r"share is 1.5, must be finite and in \(0, 1\]"),
    "infinity": (lambda: ShowClick(2, alpha=float("inf")), ValueError, "alpha is inf, must be finite"),
    "no seconds": (lambda: Age(0), ValueError, "Age: seconds is 0, must be at least 1"),
    **{
        f"a chance of {chance}": (lambda c=chance: Probability(c), ValueError, r"must be finite and in \(0, 1\]")
        for chance in (0.0, -0.5, 1.5, float("nan"))
    },
    **{
        f"{given!r} for {rule.__name__}": (
            lambda r=rule, g=given: r(g),
            TypeError,
            f"{rule.__name__}: .* expected a number",
        )
        for rule in (Probability, Count, Norm)
        for given in ("a", True, [0.5], torch.ones(2))
    },
    **{
        f"a norm of {least}": (lambda n=least: Norm(n), ValueError, f"Norm: least is {least}, must be finite and in")
        for least in (-1.0, 0.0, float("nan"))
    },
}


@pytest.mark.parametrize("kind", WRONG)
def test_invalid_rules_are_refused(kind: str) -> None:
    make, error, message = WRONG[kind]
    with pytest.raises(error, match=message):
        make()


# ---- Rec SDK's config

SHOWCLICK = rst.AdmitAndEvictPolicyType.POLICY_SHOWCLICK
CLICKS = rst.ShowClickParams(1, 1, admit_threshold=3)
COUNTS: Any = int(rst.AdmitAndEvictPolicyType.POLICY_COUNT.value)
CONFIGS: list[tuple[dict[str, Any], TableLifecycle]] = [
    ({"score_half_life": 3, "max_rows": 9}, TableLifecycle(bound=Rows(9), score=Score(half_life=3))),
    (
        {"sketch_bytes": 99, "sketch_depth": 3, "sketch_halve_after": 7, "admit_threshold": 3},
        TableLifecycle(admission=Sketch(3, bytes=99, depth=3, halve_after=7)),
    ),
    (
        {"admit_probability": 0.5, "evict_threshold": 9, "policy_type": COUNTS},
        TableLifecycle(admission=Probability(0.5), eviction=Age(9)),
    ),
    ({"evict_norm": 2, "evict_step_interval": 7}, TableLifecycle(eviction=Norm(2), every=7)),
]


@pytest.mark.parametrize(("given", "lifecycle"), CONFIGS, ids=[" ".join(given) for given, _ in CONFIGS])
def test_a_config_is_translated_to_rules(given: dict[str, Any], lifecycle: TableLifecycle) -> None:
    assert rst.AdmitAndEvictConfig(**given).table_lifecycle() == lifecycle


CONFIGS_WRONG: list[tuple[dict[str, Any], str]] = [
    *(
        ({"score_half_life": 3, **more}, "score_half_life is 3, and no rule uses scores")
        for more in ({}, {"admit_threshold": 2}, {"keep_evicted": True})
    ),
    (
        {"score_half_life": 3, "keep_evicted": True, "policy_type": rst.AdmitAndEvictPolicyType.NONE},
        "policy_type is NONE.*'score_half_life': 3",
    ),
    ({"sketch_bytes": 99}, "sketch_bytes is 99 without an admit_threshold"),
    ({"sketch_halve_after": 99, "admit_threshold": 3}, "sketch_halve_after is 99 without sketch_bytes"),
    ({"sketch_depth": 8, "admit_threshold": 3}, "sketch_depth is 8 without sketch_bytes"),
    (
        {
            "sketch_bytes": 99,
            "showclick_params": rst.ShowClickParams(1, 1, admit_threshold=3),
            "policy_type": SHOWCLICK,
        },
        "a sketch counts lookups alone",
    ),
    ({"admit_probability": 0.5, "admit_threshold": 2}, "ids are admitted by chance or by counts"),
    ({"admit_probability": 0.0}, r"admit_probability is 0\.0, must be finite and in"),
    ({"admit_probability": 0.5, "policy_type": SHOWCLICK}, "which only POLICY_COUNT supports"),
    ({"evict_norm": -1}, "evict_norm is -1"),
]


@pytest.mark.parametrize(("given", "message"), CONFIGS_WRONG)
def test_invalid_admit_and_evict_configs_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rst.AdmitAndEvictConfig(**given).table_lifecycle()


# ---- the fields of former versions

SPELLINGS: list[tuple[dict[str, Any], TableLifecycle]] = [
    ({"admit_threshold": 3}, TableLifecycle(admission=Count(3))),
    ({"admit_threshold": 3, "default_value": 0.5}, TableLifecycle(admission=Count(3), default_value=0.5)),
    ({"admit_threshold": 3, "alpha": 2, "beta": 0.5}, TableLifecycle(admission=ShowClick(3, 2, 0.5))),
    ({"admit_threshold": 3, "sketch_bytes": 99}, TableLifecycle(admission=Sketch(3, bytes=99))),
    (
        {"admit_threshold": 3, "sketch_bytes": 99, "sketch_depth": 2, "sketch_halve_after": 7, "alpha": 0.5},
        TableLifecycle(admission=Sketch(3, bytes=99, depth=2, halve_after=7, alpha=0.5)),
    ),
    ({"admit_probability": 0.5}, TableLifecycle(admission=Probability(0.5))),
    (
        {"evict_age": 9, "evict_idle_steps": 8, "evict_norm": 0.5, "evict_step_interval": 7},
        TableLifecycle(eviction=[Age(9), Idle(8), Norm(0.5)], every=7),
    ),
    ({"evict_share": 0.25}, TableLifecycle(eviction=Share(0.25))),
    (
        {"evict_share": 0.25, "alpha": 2, "beta": 1, "score_decay": 0.5},
        TableLifecycle(eviction=Share(0.25), score=Score(2, 1, 0.5)),
    ),
    ({"max_rows": 9, "score_half_life": 4}, TableLifecycle(bound=Rows(9), score=Score(half_life=4))),
    (
        {"max_rows": 9, "max_bytes": 99, "keep_evicted": True},
        TableLifecycle(bound=[Rows(9), Bytes(99)], keep_evicted=True),
    ),
]


@pytest.mark.parametrize(("former", "lifecycle"), SPELLINGS, ids=[" ".join(former) for former, _ in SPELLINGS])
def test_former_fields_work_and_warn_with_the_new_spelling(former: dict[str, Any], lifecycle: TableLifecycle) -> None:
    with pytest.warns(FutureWarning, match="takes rules as objects: write ") as seen:
        made = TableLifecycle(**former)
    assert made == lifecycle
    (warning,) = seen
    assert issubclass(warning.category, rst.DeprecatedWarning)
    assert warning.filename == __file__
    spelling = str(warning.message).partition("write ")[2]
    assert eval(spelling, {"TableLifecycle": TableLifecycle, "rules": rules}) == lifecycle, "it can be copied"
    for name, value in former.items():
        if name not in ("default_value", "keep_evicted"):
            with pytest.warns(FutureWarning, match=f"TableLifecycle.{name} is read from its rules"):
                assert getattr(lifecycle, name) == value


def test_every_former_field_is_in_the_table() -> None:
    assert {name for former, _ in SPELLINGS for name in former} == OPTIONS.keys()


def test_the_warning_contains_code_to_copy() -> None:
    with pytest.warns(FutureWarning) as seen:
        TableLifecycle(3, evict_idle_steps=1000, evict_step_interval=100)  # type: ignore[misc, call-arg]
    assert str(seen[0].message) == (
        "TableLifecycle(admit_threshold, evict_idle_steps, evict_step_interval) takes rules as objects: write "
        "TableLifecycle(admission=rules.Count(threshold=3.0), eviction=[rules.Idle(batches=1000)], every=100)"
    )


FORMER_WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "decay": ({"score_half_life": 2, "max_rows": 2, "score_decay": 0.5}, "Score: half_life is 2 beside decay 0.5"),
    "score": ({"score_half_life": 2}, "score_half_life is 2, and no rule uses scores"),
    "chance": ({"admit_probability": 0.5, "admit_threshold": 2}, "ids are admitted by chance or by counts"),
    "depth": ({"sketch_depth": 3, "admit_threshold": 2}, "sketch_depth is 3 without sketch_bytes"),
    "halves": ({"sketch_halve_after": 9, "admit_threshold": 2}, "sketch_halve_after is 9 without sketch_bytes"),
    "threshold": ({"sketch_bytes": 9}, "sketch_bytes is 9 without an admit_threshold"),
    "clicks": (
        {"sketch_bytes": 9, "beta": 1.0, "admit_threshold": 2},
        "beta is 1.0 beside sketch_bytes: a sketch counts lookups alone",
    ),
    "shows": ({"sketch_bytes": 9, "alpha": 0.0, "admit_threshold": 2}, r"Sketch: alpha is 0.0, must be finite and in"),
    "range": ({"max_rows": -1}, "Rows: most is -1, must be at least 1"),
}


@pytest.mark.parametrize("kind", FORMER_WRONG)
def test_invalid_former_fields_are_refused(kind: str) -> None:
    fields, message = FORMER_WRONG[kind]
    with pytest.raises(ValueError, match=message):
        TableLifecycle(**fields)


def test_former_fields_together_with_rules_are_refused() -> None:
    wrong: Any = {"max_rows": 9}
    with pytest.raises(TypeError, match="TableLifecycle: max_rows beside admission: pass rules only"):
        TableLifecycle(admission=Count(3), **wrong)
    with pytest.raises(TypeError, match="max_rows beside eviction, score"):
        dataclasses.replace(TableLifecycle(eviction=Share(0.5)), **wrong)
    with pytest.raises(TypeError, match="unexpected keyword argument 'no_such'"):
        any_of(no_such=3)
    with pytest.raises(AttributeError, match="TableLifecycle has no attribute 'no_such'"):
        any_of().no_such  # noqa: B018


def test_copies_and_pickles_of_either_version() -> None:
    lifecycle = TableLifecycle(admission=Count(3), eviction=[Age(9), Share(0.5)])
    before, former = {name: default for name, (default, *_) in OPTIONS.items()}, copy.copy(lifecycle)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (
            pickle.loads(pickle.dumps(lifecycle))
            == copy.deepcopy(lifecycle)
            == dataclasses.replace(lifecycle)
            == lifecycle
        )
    with pytest.warns(FutureWarning, match="write TableLifecycle"):
        # type: ignore[attr-defined]
        former.__setstate__({**before, "admit_threshold": 3.0, "evict_age": 9, "evict_share": 0.5})
    assert former == lifecycle
