"""The device backends of the cache, one file each."""
