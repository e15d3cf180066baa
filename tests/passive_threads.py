"""Makes torch's OpenMP threads sleep while they wait; imported before torch.

By default, waiting threads spin, which is faster only if each thread has a core of its own. With two test processes on
two cores, some test files took six times as long with spinning threads.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
