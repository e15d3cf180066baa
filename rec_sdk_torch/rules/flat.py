"""The rules of a table in one list of options: `AdmitAndEvictConfig` has them so, and `TableLife` had."""

from typing import Any

from .age import Age
from .count import Count
from .idle import Idle
from .norm import Norm
from .probability import Probability
from .rows import Bytes, Rows
from .rule import Admission
from .score import Score
from .share import Share
from .showclick import ShowClick
from .sketch import Sketch

SKETCH_DEPTH = 4


def rules_of(
    owner: str,
    *,
    admit_threshold: float | None = None,
    default_value: float = 0.0,
    alpha: float = 1.0,
    beta: float = 0.0,
    evict_share: float = 0.0,
    score_decay: float = 1.0,
    evict_age: int = 0,
    evict_idle_steps: int = 0,
    evict_step_interval: int = 0,
    max_rows: int = 0,
    max_bytes: int = 0,
    keep_evicted: bool = False,
    admit_probability: float | None = None,
    evict_norm: float = 0.0,
    score_half_life: int = 0,
    sketch_bytes: int = 0,
    sketch_depth: int = SKETCH_DEPTH,
    sketch_halve_after: int = 0,
) -> dict[str, Any]:
    """Returns the fields of a `TableLife`. A number of 0 turns its rule off.

    Raises:
        ValueError: two options that exclude each other, or one without the other that it needs; `owner` begins the
            message. TypeError, ValueError: a number of another type, or out of range.
    """
    bounds = [kind(most) for kind, most in ((Rows, max_rows), (Bytes, max_bytes)) if most]
    shared = {"sketch_halve_after": (sketch_halve_after, 0), "sketch_depth": (sketch_depth, SKETCH_DEPTH)}
    lone = [f"{name} is {given}" for name, (given, default) in shared.items() if given != default and not sketch_bytes]
    for wrong, message in (
        (
            admit_probability is not None and (admit_threshold is not None or sketch_bytes),
            f"admit_probability is {admit_probability} beside admit_threshold {admit_threshold} and sketch_bytes "
            f"{sketch_bytes}: ids are admitted by chance or by counts",
        ),
        (lone, f"{', '.join(lone)} without sketch_bytes: there is no sketch"),
        (
            sketch_bytes and admit_threshold is None,
            f"sketch_bytes is {sketch_bytes} without an admit_threshold: there is nothing to count",
        ),
        (
            sketch_bytes and (alpha <= 0 or beta),
            f"a sketch counts lookups alone, so alpha has to be above 0 and beta 0, got {alpha} and {beta}: correct "
            "these, or leave sketch_bytes 0",
        ),
        (
            score_half_life and score_decay != 1,
            f"score_half_life is {score_half_life} beside score_decay {score_decay}: scores decay by one of them",
        ),
        (
            score_half_life and not (evict_share or bounds),
            f"score_half_life is {score_half_life}, and no rule goes by scores: give a share or a bound too",
        ),
    ):
        if wrong:
            raise ValueError(f"{owner}: {message}")
    admission: Admission | None = None
    if admit_probability is not None:
        admission = Probability(admit_probability)
    elif admit_threshold is not None and sketch_bytes:
        admission = Sketch(admit_threshold, sketch_bytes, sketch_depth, sketch_halve_after, alpha)
    elif admit_threshold is not None:
        counts = alpha == 1 and not beta
        admission = Count(admit_threshold) if counts else ShowClick(admit_threshold, alpha, beta)
    evictions: dict[Any, float] = {Age: evict_age, Idle: evict_idle_steps, Norm: evict_norm, Share: evict_share}
    return {
        "admission": admission,
        "eviction": [kind(number) for kind, number in evictions.items() if number],
        "every": evict_step_interval,
        "bound": bounds,
        "score": Score(alpha, beta, score_decay, score_half_life) if evict_share or score_half_life else None,
        "keep_evicted": keep_evicted,
        "default_value": default_value,
    }
