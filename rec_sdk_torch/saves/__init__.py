"""Checkpoints of tables: their format, and code that writes, loads and serves them."""
