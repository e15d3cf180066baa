"""Imported before torch: its threads sleep while they wait.

They would spin, which wins only where each has a core of its own. With two processes of tests on two cores, some files
took six times as long.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
