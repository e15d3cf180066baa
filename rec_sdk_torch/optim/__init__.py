"""Optimizers of tables: optimizer assignments, the fused optimizer, gradient norms and clipping, Accumulate classes."""
