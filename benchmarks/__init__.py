"""Benchmarks: ours and its rivals, interleaved in one process. `python -m benchmarks.cpu --help`."""
