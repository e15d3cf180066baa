from dataclasses import dataclass, field

from ..runtime.numbers import float_field, int_field
from .rule import Admission

MOST_DEPTH = 16
"""More cells of an id make a sketch slower, and its errors hardly rarer."""


@dataclass(frozen=True)
class Sketch(Admission):
    """Admits ids as `Count` does, by a sketch: it never counts too little, so an id may be admitted before.

    Attributes:
        threshold: an id is admitted in the training batch with which `alpha * lookups` reaches this.
        bytes: of the sketch, however many ids there are.
        depth: cells of an id, 1 to 16.
        halve_after: lookups in the sketch with which all its cells are halved, at the end of a step; 0: never.
        alpha: factor of the lookups, above 0.
    """

    divided = ("bytes", "halve_after")

    threshold: float = field(metadata=float_field())
    bytes: int = field(metadata=int_field(1))
    depth: int = field(default=4, metadata=int_field(1, MOST_DEPTH))
    halve_after: int = field(default=0, metadata=int_field(0))
    alpha: float = field(default=1.0, metadata=float_field(above=0))
