from dataclasses import dataclass, field

from ..runtime.numbers import int_field
from .rule import Eviction


@dataclass(frozen=True)
class Idle(Eviction):
    """The rule that evicts ids, and candidates, that none of the latest training batches contained.

    Attributes:
        batches: how many training batches, 1 or more.
    """

    batches: int = field(metadata=int_field(1))

    def columns(self) -> tuple[str, ...]:
        return ("last_use",)
