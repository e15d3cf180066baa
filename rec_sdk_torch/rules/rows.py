from dataclasses import dataclass

from .rule import Bound


@dataclass(frozen=True)
class Rows(Bound):
    """Bounds the rows of a table: from more than `most`, those with the lowest `Score`, or count, are evicted.

    7/8 of the bound stay. The same holds for candidates.

    Attributes:
        most: rows, 1 or more.
    """

    def rows(self, record_bytes: int) -> int:
        return self.most


@dataclass(frozen=True)
class Bytes(Bound):
    """Bounds the rows of a table as `Rows` does, by the bytes of their records in host memory.

    Attributes:
        most: bytes, 1 or more. One row may stay in any case.
    """

    def rows(self, record_bytes: int) -> int:
        return max(1, self.most // record_bytes)
