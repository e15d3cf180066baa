"""Exports and serves tables: looks up rows in checkpoints, writes quantized copies, exports tables of models."""
