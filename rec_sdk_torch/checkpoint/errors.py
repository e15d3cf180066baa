"""Errors that say what is wrong with a save."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A save is missing, damaged, or of something else; the message names the file."""
