"""The device backends of the cache, one file for each device type."""
