"""Tables of saves, for serving."""

from .saves.serve.table_reader import TableReader

__all__ = ["TableReader"]
