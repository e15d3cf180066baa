"""Optimizers of tables: assignments, the fused optimizer for TorchRec, norms and clipping, Accumulate classes."""
