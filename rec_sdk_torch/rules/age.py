from dataclasses import dataclass, field

from ..runtime.numbers import int_field
from .rule import Eviction


@dataclass(frozen=True)
class Age(Eviction):
    """The rule that evicts ids, and candidates, whose timestamp is long before the table's latest timestamp.

    Attributes:
        seconds: the largest difference of the timestamps that is kept, 1 or more.
    """

    seconds: int = field(metadata=int_field(1))

    def columns(self) -> tuple[str, ...]:
        return ("timestamp",)
