from dataclasses import dataclass, field

from ..runtime.numbers import float_field
from .rule import Admission


@dataclass(frozen=True)
class Count(Admission):
    """The rule that admits an id in the training batch in which its number of lookups reaches `threshold`."""

    threshold: float = field(metadata=float_field())
