"""Serving: `TableReader` looks up rows in saved tables, without the training process."""

from .saves.serve.table_reader import TableReader

__all__ = ["TableReader"]
