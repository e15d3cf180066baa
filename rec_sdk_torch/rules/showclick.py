from dataclasses import dataclass, field

from ..runtime.numbers import float_field
from .rule import Admission


@dataclass(frozen=True)
class ShowClick(Admission):
    """Admits an id in the training batch with which `alpha * shows + beta * clicks` reaches `threshold`.

    Attributes:
        threshold: the sum, the lookups and clicks of the batch included.
        alpha: factor of the shows, which are lookups.
        beta: factor of the clicks.
    """

    threshold: float = field(metadata=float_field())
    alpha: float = field(default=1.0, metadata=float_field())
    beta: float = field(default=0.0, metadata=float_field())

    def needs_clicks(self) -> bool:
        return self.beta != 0
