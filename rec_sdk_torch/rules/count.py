from dataclasses import dataclass, field

from ..runtime.numbers import float_field
from .rule import Admission


@dataclass(frozen=True)
class Count(Admission):
    """Admits an id in the training batch with which it was looked up `threshold` times."""

    threshold: float = field(metadata=float_field())
