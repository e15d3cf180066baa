"""Tables for serving: lookups in saves, copies of saves, live tables as modules and files."""
