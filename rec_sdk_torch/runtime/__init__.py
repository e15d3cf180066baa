"""Threads, exits, imports, warnings, settings and command lines: the package over Python and the system."""
