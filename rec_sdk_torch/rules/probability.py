from dataclasses import dataclass, field

from ..runtime.numbers import float_field
from .rule import Admission


@dataclass(frozen=True)
class Probability(Admission):
    """The rule by which each training batch that contains an id admits it with this probability, without counts.

    Attributes:
        probability: above 0 and at most 1.
    """

    counts = False

    probability: float = field(metadata=float_field(above=0, most=1))
