from dataclasses import dataclass

from .rule import Bound


@dataclass(frozen=True)
class Rows(Bound):
    """The rule that bounds a table to `most` rows (1 or more), and its candidates to as many.

    A table beyond the bound evicts the rows with the lowest `Score`, or without scores the lowest count, until 7/8 of
    the bound are left.
    """


@dataclass(frozen=True)
class Bytes(Bound):
    """The rule that bounds a table like `Rows`, by bytes: `most` bytes of records in host memory, at least one row."""

    def numbers(self, record_bytes: int) -> tuple[str, dict[str, float]]:
        return "rows", {"most": max(1, self.most // record_bytes)}
