from dataclasses import dataclass, field

from ..runtime.numbers import float_field
from .rule import Eviction


@dataclass(frozen=True)
class Share(Eviction):
    """The rule that evicts a fraction of the rows, namely the rows with the lowest `Score`.

    Attributes:
        share: the fraction, above 0 and at most 1; at least one row is evicted.
    """

    share: float = field(metadata=float_field(above=0, most=1))
