from dataclasses import dataclass, field

from ..runtime.numbers import int_field
from .rule import Eviction


@dataclass(frozen=True)
class Age(Eviction):
    """The rule that evicts ids and candidates whose timestamp is older than the table's latest timestamp by a limit.

    Attributes:
        seconds: the largest age, in seconds, at which an id is kept: the latest timestamp minus the id's; 1 or more.
    """

    seconds: int = field(metadata=int_field(1))

    def columns(self) -> tuple[str, ...]:
        return ("timestamp",)
