"""Rules in the form of a flat list of options, which `AdmitAndEvictConfig` takes and `TableLifecycle` formerly took."""

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
"""For each option: its default, the field of rules that it sets, and the rules that have this field."""


_NEEDS = {
    "admit_threshold": " beside admit_probability: ids are admitted by chance or by counts",
    "sketch_bytes": " without an admit_threshold: there is nothing to count",
    "sketch_depth": " without sketch_bytes: there is no sketch",
    "sketch_halve_after": " without sketch_bytes: there is no sketch",
    "score_half_life": ", and no rule uses scores: set a share or a bound too",
}
"""The end of the error message for each option that has no effect without, or together with, another option."""


def rules_from_options(owner: str, **options: Any) -> dict[str, Any]:
    """Converts options to the fields of a `TableLifecycle`.

    Args:
        owner: the class with the options, named at the beginning of error messages.
        options: some of `OPTIONS`; an eviction option of 0 turns its rule off.

    Raises:
        ValueError: two options exclude each other, or an option has no effect without another one.
        TypeError, ValueError: a number has another type or is out of range.
    """
    values = {name: default for name, (default, _, _) in OPTIONS.items()} | options
    evictions = [kind for kind in (Age, Idle, Norm, Share) if _is_on(kind, values)]
    bounds = [kind for kind in (Rows, Bytes) if _is_on(kind, values)]
    scores = [Score] if Share in evictions or (bounds and values["score_half_life"]) else []
    admission: list[type[Rule]] = []
    if values["admit_probability"] is not None:
        admission = [Probability]
    elif values["admit_threshold"] is not None:
        by_shows = Count if (values["alpha"], values["beta"]) == (1, 0) else ShowClick
        admission = [Sketch if values["sketch_bytes"] else by_shows]
    chosen = {*admission, *evictions, *bounds, *scores}
    for name, needs in _NEEDS.items():
        if values[name] != OPTIONS[name][0] and not chosen.intersection(OPTIONS[name][2]):
            raise ValueError(f"{owner}: {name} is {values[name]}{needs}")
    if Sketch in chosen and values["beta"]:
        raise ValueError(f"{owner}: beta is {values['beta']} beside sketch_bytes: a sketch counts lookups alone")

    def make(kinds: Sequence[type[Rule]]) -> list[Rule]:
        return [
            kind(**{field: values[name] for name, (_, field, rules) in OPTIONS.items() if kind in rules})
            for kind in kinds
        ]

    return {
        "admission": next(iter(make(admission)), None),
        "eviction": make(evictions),
        "every": values["evict_step_interval"],
        "bound": make(bounds),
        "score": next(iter(make(scores)), None),
        "keep_evicted": values["keep_evicted"],
        "default_value": values["default_value"],
    }


def _is_on(kind: type[Rule], values: Mapping[str, Any]) -> bool:
    return any(values[name] for name, (_, _, kinds) in OPTIONS.items() if kinds == (kind,))
