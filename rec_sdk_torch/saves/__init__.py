"""Checkpoints of tables: their format, and how they are written, loaded and served."""
