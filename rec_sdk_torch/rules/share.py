from dataclasses import dataclass, field

from ..runtime.numbers import float_field
from .rule import Eviction


@dataclass(frozen=True)
class Share(Eviction):
    """Evicts this share of the rows (above 0, up to 1), those with the lowest `Score`, and at least one row."""

    share: float = field(metadata=float_field(above=0, most=1))
