"""Batches of ids that carry more than ids."""
