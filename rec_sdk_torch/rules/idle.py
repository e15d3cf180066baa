from dataclasses import dataclass, field

from ..runtime.numbers import int_field
from .rule import Eviction


@dataclass(frozen=True)
class Idle(Eviction):
    """Evicts ids, candidates too, that none of the latest `batches` (1 or more) training batches had."""

    batches: int = field(metadata=int_field(1))

    def columns(self) -> tuple[str, ...]:
        return ("last_use",)
