"""The rules of a table in one list of options: `AdmitAndEvictConfig` has them so, and `TableLifecycle` had."""

from collections.abc import Mapping, Sequence
from typing import Any

from .age import Age
from .count import Count
from .idle import Idle
from .norm import Norm
from .probability import Probability
from .rows import Bytes, Rows
from .rule import Rule
from .score import Score
from .share import Share
from .showclick import ShowClick
from .sketch import Sketch

OPTIONS: dict[str, tuple[Any, str, tuple[type[Rule], ...]]] = {
    "admit_threshold": (None, "threshold", (Count, ShowClick, Sketch)),
    "default_value": (0.0, "", ()),
    "alpha": (1.0, "alpha", (ShowClick, Sketch, Score)),
    "beta": (0.0, "beta", (ShowClick, Score)),
    "evict_share": (0.0, "share", (Share,)),
    "score_decay": (1.0, "decay", (Score,)),
    "evict_age": (0, "seconds", (Age,)),
    "evict_idle_steps": (0, "batches", (Idle,)),
    "evict_step_interval": (0, "", ()),
    "max_rows": (0, "most", (Rows,)),
    "max_bytes": (0, "most", (Bytes,)),
    "keep_evicted": (False, "", ()),
    "admit_probability": (None, "probability", (Probability,)),
    "evict_norm": (0.0, "least", (Norm,)),
    "score_half_life": (0, "half_life", (Score,)),
    "sketch_bytes": (0, "bytes", (Sketch,)),
    "sketch_depth": (4, "depth", (Sketch,)),
    "sketch_halve_after": (0, "halve_after", (Sketch,)),
}
"""The default of each option, and the rules that have it, under which name."""


_NEEDS = {
    "admit_threshold": " beside admit_probability: ids are admitted by chance or by counts",
    "sketch_bytes": " without an admit_threshold: there is nothing to count",
    "sketch_depth": " without sketch_bytes: there is no sketch",
    "sketch_halve_after": " without sketch_bytes: there is no sketch",
    "score_half_life": ", and no rule goes by scores: give a share or a bound too",
}
"""Ends of the errors that options raise which none of the chosen rules has."""


def rules_from_options(owner: str, **options: Any) -> dict[str, Any]:
    """Returns the fields of a `TableLifecycle`. A number of 0 turns its rule off.

    Raises:
        ValueError: two options that exclude each other, or one without the other that it needs; `owner` begins the
            message. TypeError, ValueError: a number of another type, or out of range.
    """
    has = {name: default for name, (default, _, _) in OPTIONS.items()} | options
    evictions = [kind for kind in (Age, Idle, Norm, Share) if _is_on(kind, has)]
    bounds = [kind for kind in (Rows, Bytes) if _is_on(kind, has)]
    scores = [Score] if Share in evictions or (bounds and has["score_half_life"]) else []
    admission: list[type[Rule]] = []
    if has["admit_probability"] is not None:
        admission = [Probability]
    elif has["admit_threshold"] is not None:
        by_shows = Count if (has["alpha"], has["beta"]) == (1, 0) else ShowClick
        admission = [Sketch if has["sketch_bytes"] else by_shows]
    chosen = {*admission, *evictions, *bounds, *scores}
    for name, needs in _NEEDS.items():
        if has[name] != OPTIONS[name][0] and not chosen.intersection(OPTIONS[name][2]):
            raise ValueError(f"{owner}: {name} is {has[name]}{needs}")
    if Sketch in chosen and has["beta"]:
        raise ValueError(f"{owner}: beta is {has['beta']} beside sketch_bytes: a sketch counts lookups alone")

    def make(kinds: Sequence[type[Rule]]) -> list[Rule]:
        return [kind(**{field: has[name] for name, (_, field, of) in OPTIONS.items() if kind in of}) for kind in kinds]

    return {
        "admission": next(iter(make(admission)), None),
        "eviction": make(evictions),
        "every": has["evict_step_interval"],
        "bound": make(bounds),
        "score": next(iter(make(scores)), None),
        "keep_evicted": has["keep_evicted"],
        "default_value": has["default_value"],
    }


def _is_on(kind: type[Rule], has: Mapping[str, Any]) -> bool:
    return any(has[name] for name, (_, _, kinds) in OPTIONS.items() if kinds == (kind,))
