"""Embedding collections and their configs."""
