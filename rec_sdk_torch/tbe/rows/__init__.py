"""All tables of one embedding: layout, locks, reads and writes, state dicts, and what saves and loads need."""
