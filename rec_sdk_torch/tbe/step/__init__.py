"""The order of steps of one embedding: lookups, updates, locks, batches to come, checks of gradients, counts."""
