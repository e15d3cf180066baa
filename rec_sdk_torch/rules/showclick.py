from dataclasses import dataclass, field

from ..runtime.numbers import float_field
from .rule import Admission


@dataclass(frozen=True)
class ShowClick(Admission):
    """The rule that admits an id in the training batch in which `alpha * shows + beta * clicks` reaches `threshold`.

    Attributes:
        threshold: the least sum that admits an id; it includes the lookups and clicks of the present batch.
        alpha: factor of the shows, which are lookups.
        beta: factor of the clicks.
    """

    threshold: float = field(metadata=float_field())
    alpha: float = field(default=1.0, metadata=float_field())
    beta: float = field(default=0.0, metadata=float_field())

    def needs_clicks(self) -> bool:
        return self.beta != 0
