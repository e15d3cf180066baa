from dataclasses import dataclass, field

from ..runtime.numbers import whole
from .rule import Eviction


@dataclass(frozen=True)
class Age(Eviction):
    """Evicts ids, candidates too, whose timestamp is more than `seconds` (1 or more) before the table's latest."""

    seconds: int = field(metadata=whole(1))

    def columns(self) -> tuple[str, ...]:
        return ("timestamp",)
