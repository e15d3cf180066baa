"""Writes the tables of a model to a folder."""
