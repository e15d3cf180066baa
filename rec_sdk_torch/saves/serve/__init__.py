"""Exports and serves tables: lookups in checkpoints, quantized copies, and exports of live tables."""
