"""The device cache of one group of tables: batches, plans, swaps, copies, lookups and updates."""
