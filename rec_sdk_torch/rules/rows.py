from dataclasses import dataclass

from .rule import Bound


@dataclass(frozen=True)
class Rows(Bound):
    """The rule that bounds a table to `most` rows and to `most` candidates; `most` is 1 or more.

    A table beyond the bound evicts the rows with the lowest `Score`, or without scores the lowest count, until 7/8 of
    the bound remains.
    """


@dataclass(frozen=True)
class Bytes(Bound):
    """The rule that bounds a table like `Rows`, but to `most` bytes of records in host memory; one row always fits."""

    def numbers(self, record_bytes: int) -> tuple[str, dict[str, float]]:
        return "rows", {"most": max(1, self.most // record_bytes)}
