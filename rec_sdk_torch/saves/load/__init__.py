"""Reads a save into the tables of a model: a save of this package, or of Rec SDK."""
