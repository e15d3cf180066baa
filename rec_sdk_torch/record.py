"""The record of a row in Python: typed views of weight and states in a buffer of records."""

from .operators.record import RecordLayout

__all__ = ["RecordLayout"]
