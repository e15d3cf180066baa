from dataclasses import dataclass

from .rule import Bound


@dataclass(frozen=True)
class Rows(Bound):
    """Bounds a table to `most` rows (1 or more): from more than that, those with the lowest `Score`, or count, leave.

    7/8 of the bound stay. The same holds for candidates.
    """


@dataclass(frozen=True)
class Bytes(Bound):
    """Bounds a table as `Rows` does, by the bytes of its rows' records in host memory (1 or more; one row may stay)."""

    def numbers(self, record_bytes: int) -> tuple[str, dict[str, float]]:
        return "rows", {"most": max(1, self.most // record_bytes)}
