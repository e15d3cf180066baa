"""Tables of saves, for serving."""

from .table_reader import TableReader as TableReader
