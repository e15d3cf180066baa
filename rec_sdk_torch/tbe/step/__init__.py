"""Training steps of one embedding: lookups, updates, prefetching, checks of gradients, statistics."""
