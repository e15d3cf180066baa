from dataclasses import dataclass, field

from ..runtime.numbers import float_field, int_field
from .rule import Admission

MOST_DEPTH = 16
"""The most cells of an id. More cells make a sketch slower, and errors hardly rarer."""


@dataclass(frozen=True)
class Sketch(Admission):
    """The rule that admits ids by their number of lookups, like `Count`, but counted in a count-min sketch.

    Its memory does not grow with the number of ids. It may count too much, and so admit an id early, but never too
    little.

    Attributes:
        threshold: an id is admitted in the training batch in which `alpha * lookups` reaches this.
        bytes: size of the sketch.
        depth: cells of an id, 1 to 16.
        halve_after: when the sketch has counted this many lookups, the step halves all cells at its end; 0: never.
        alpha: factor of the lookups, above 0.
    """

    divided = ("bytes", "halve_after")

    threshold: float = field(metadata=float_field())
    bytes: int = field(metadata=int_field(1))
    depth: int = field(default=4, metadata=int_field(1, MOST_DEPTH))
    halve_after: int = field(default=0, metadata=int_field(0))
    alpha: float = field(default=1.0, metadata=float_field(above=0))
