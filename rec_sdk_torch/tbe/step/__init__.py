"""Training steps of one embedding: lookups, updates, prefetching, gradient checks and statistics."""
