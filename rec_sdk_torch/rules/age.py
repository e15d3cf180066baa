from dataclasses import dataclass, field

from ..runtime.numbers import whole
from .rule import Eviction


@dataclass(frozen=True)
class Age(Eviction):
    """Evicts ids, candidates too, whose latest timestamp is more than `seconds` before the table's latest.

    Attributes:
        seconds: 1 or more.
    """

    seconds: int = field(metadata=whole(1))

    def columns(self) -> tuple[str, ...]:
        return ("timestamp",)
