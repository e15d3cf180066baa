"""Saves of tables: their format, how they are written, loaded and served."""
