"""Sharded collections, prefetching, training pipelines and cache logging."""
