"""Loads the tables of a model from a checkpoint of this package or of Rec SDK."""
