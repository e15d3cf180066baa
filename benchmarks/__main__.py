"""Runs one benchmark of the table: `python -m benchmarks NAME [--help]`."""

from __future__ import annotations

import sys

from . import NAMES, find

if sys.argv[1:2] and sys.argv[1] in NAMES:
    find(sys.argv[1]).start(sys.argv[2:])
sys.exit(f"python -m benchmarks NAME [--help]; NAME is one of: {', '.join(NAMES)}")
