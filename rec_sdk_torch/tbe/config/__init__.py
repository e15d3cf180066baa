"""Descriptions of tables: options, life, size of their cache, optimizers. Imports no other room of tbe."""
