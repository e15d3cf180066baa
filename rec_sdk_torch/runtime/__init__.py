"""Utilities for Python and the operating system: threads, exit, forks, imports, warnings, settings, command lines."""
