"""The base classes of rules: `Admission`, `Eviction` and `Bound`. Each rule is a file beside this one."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import ClassVar, Self

from ..runtime.numbers import check_fields, int_field


@dataclass(frozen=True)
class Rule:
    """The base of rules. The engine identifies a rule by its class name in lower case, its numbers by field names."""

    divided: ClassVar[tuple[str, ...]] = ()
    """Fields that are divided among the ranks of a sharded table, unless they are 0."""

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_fields(self)

    def columns(self) -> tuple[str, ...]:
        """Returns the names of the row columns that the rule reads, a subset of `COLUMNS`."""
        return ()

    def needs_clicks(self) -> bool:
        """Returns whether every training batch must include clicks."""
        return False

    def numbers(self, record_bytes: int) -> tuple[str, dict[str, float]]:
        """Returns the engine's name of the rule and its numbers, for records of `record_bytes` bytes."""
        return type(self).__name__.lower(), asdict(self)

    def part(self, divide: Callable[[int], int]) -> Self:
        """Returns the rule for one rank of a sharded table; `divide` computes the rank's share of a number."""
        numbers = {name: getattr(self, name) for name in self.divided}
        return replace(self, **{name: divide(number) for name, number in numbers.items() if number})


class Admission(Rule):
    """The base of rules that decide when an id gets a row."""

    counts: ClassVar[bool] = True
    """Whether the rule counts lookups of ids that have no row yet."""


class Eviction(Rule):
    """The base of rules that evict ids, applied at an interval of training steps."""


@dataclass(frozen=True)
class Bound(Rule):
    """The base of rules that bound the size of a table, applied after each training step."""

    divided = ("most",)

    most: int = field(metadata=int_field(1))

    def columns(self) -> tuple[str, ...]:
        return "count", "last_use"
