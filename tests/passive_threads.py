"""Makes torch's OpenMP threads sleep while they wait; imported before torch.

By default they spin, which is faster only if each has its own core. With two test processes on two cores, some files
took six times as long.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
