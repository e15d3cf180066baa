from dataclasses import dataclass, field

from ..runtime.numbers import float_field
from .rule import Admission


@dataclass(frozen=True)
class Probability(Admission):
    """Admits an id with this probability (above 0, up to 1) in each training batch that has it; counts nothing."""

    counts = False

    probability: float = field(metadata=float_field(above=0, most=1))
