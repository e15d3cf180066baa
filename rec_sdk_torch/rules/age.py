from dataclasses import dataclass, field

from ..runtime.numbers import int_field
from .rule import Eviction


@dataclass(frozen=True)
class Age(Eviction):
    """Evicts ids, candidates too, whose timestamp is more than `seconds` (1 or more) before the table's latest."""

    seconds: int = field(metadata=int_field(1))

    def columns(self) -> tuple[str, ...]:
        return ("timestamp",)
