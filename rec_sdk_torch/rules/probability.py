from dataclasses import dataclass, field

from ..runtime.numbers import float_field
from .rule import Admission


@dataclass(frozen=True)
class Probability(Admission):
    """The rule that admits an id with this probability in each training batch that contains it; nothing is counted.

    Attributes:
        probability: above 0 and at most 1.
    """

    counts = False

    probability: float = field(metadata=float_field(above=0, most=1))
