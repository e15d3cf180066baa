"""What the package needs of Python and the system: threads, exits, imports, warnings, settings, command lines."""
