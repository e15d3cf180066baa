"""Layout of a row's record: gives typed views of the weights and states in a buffer of records."""

from .operators.record import RecordLayout

__all__ = ["RecordLayout"]
