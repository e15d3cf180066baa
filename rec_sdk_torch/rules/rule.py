"""The kinds of rules. Each rule is a file beside this one."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import ClassVar, Self

from ..runtime.numbers import check_fields, int_field


@dataclass(frozen=True)
class Rule:
    """Numbers of a rule, which the engine takes under the names of the class, in lower case, and of the fields."""

    divided: ClassVar[tuple[str, ...]] = ()
    """Fields of which each rank of a sharded table has its part, unless they are 0."""

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_fields(self)

    def columns(self) -> tuple[str, ...]:
        """Returns the columns of a row that the rule needs, of those in `COLUMNS`."""
        return ()

    def needs_clicks(self) -> bool:
        """Returns whether a training batch must have clicks."""
        return False

    def numbers(self, record_bytes: int) -> tuple[str, dict[str, float]]:
        """Returns the name of the rule and its numbers, as the engine takes them for records of so many bytes."""
        return type(self).__name__.lower(), asdict(self)

    def part(self, divide: Callable[[int], int]) -> Self:
        """Returns the rule on one rank; `divide` returns the rank's part of a number."""
        numbers = {name: getattr(self, name) for name in self.divided}
        return replace(self, **{name: divide(number) for name, number in numbers.items() if number})


class Admission(Rule):
    """A rule by which an id gets a row."""

    counts: ClassVar[bool] = True
    """Whether something is counted of ids without a row."""


class Eviction(Rule):
    """A rule by which an id loses its row, applied every so many steps."""


@dataclass(frozen=True)
class Bound(Rule):
    """A bound of a table's rows, checked after each step."""

    divided = ("most",)

    most: int = field(metadata=int_field(1))

    def columns(self) -> tuple[str, ...]:
        return "count", "last_use"
