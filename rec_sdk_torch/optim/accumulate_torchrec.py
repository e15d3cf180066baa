"""Accumulate variants of TorchRec's optimizers, see `accumulate`.

All but RowWiseAdagrad stand in TorchRec for an optimizer of tables: on other parameters their `step` raises.
"""

from __future__ import annotations

import torchrec.optim

from .accumulate import Accumulating


class AccumulateRowWiseAdagrad(Accumulating, torchrec.optim.RowWiseAdagrad):
    """RowWiseAdagrad with one update per `accumulate_step` backward passes, on the sum of their gradients."""


class AccumulateLAMB(Accumulating, torchrec.optim.LAMB):
    """LAMB with one update per `accumulate_step` backward passes, on the sum of their gradients."""


class AccumulateLarsSGD(Accumulating, torchrec.optim.LarsSGD):
    """LarsSGD with one update per `accumulate_step` backward passes, on the sum of their gradients."""


class AccumulatePartialRowWiseAdam(Accumulating, torchrec.optim.PartialRowWiseAdam):
    """PartialRowWiseAdam with one update per `accumulate_step` backward passes, on the sum of their gradients."""


class AccumulatePartialRowWiseLAMB(Accumulating, torchrec.optim.PartialRowWiseLAMB):
    """PartialRowWiseLAMB with one update per `accumulate_step` backward passes, on the sum of their gradients."""
