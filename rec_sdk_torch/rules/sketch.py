from dataclasses import dataclass, field

from ..runtime.numbers import float_field, int_field
from .rule import Admission

MOST_DEPTH = 16
"""The largest number of cells per id. More cells make a sketch slower and hardly reduce its errors."""


@dataclass(frozen=True)
class Sketch(Admission):
    """The rule that, like `Count`, admits ids by their number of lookups, but counts lookups in a count-min sketch.

    The sketch's memory does not grow with the number of ids. It may overcount, and so admit an id early, but it never
    undercounts.

    Attributes:
        threshold: an id is admitted in the training batch in which `alpha * lookups` reaches this.
        bytes: size of the sketch.
        depth: cells of an id, 1 to 16.
        halve_after: number of counted lookups after which all cells are halved, at the end of a step; 0: never.
        alpha: factor of the lookups, above 0.
    """

    divided = ("bytes", "halve_after")

    threshold: float = field(metadata=float_field())
    bytes: int = field(metadata=int_field(1))
    depth: int = field(default=4, metadata=int_field(1, MOST_DEPTH))
    halve_after: int = field(default=0, metadata=int_field(0))
    alpha: float = field(default=1.0, metadata=float_field(above=0))
