from dataclasses import dataclass, field

from ..runtime.numbers import int_field
from .rule import Eviction


@dataclass(frozen=True)
class Idle(Eviction):
    """The rule that evicts ids and candidates that the table's latest training batches did not contain.

    Attributes:
        batches: number of these latest training batches, 1 or more.
    """

    batches: int = field(metadata=int_field(1))

    def columns(self) -> tuple[str, ...]:
        return ("last_use",)
