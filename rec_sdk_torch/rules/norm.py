from dataclasses import dataclass, field

from ..runtime.numbers import float_field
from .rule import Eviction


@dataclass(frozen=True)
class Norm(Eviction):
    """The rule that evicts ids whose weight has a 2-norm below `least`, a number above 0."""

    least: float = field(metadata=float_field(above=0))
