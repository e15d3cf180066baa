"""Rules by which ids of a hash table get rows and lose them, for `TableLifecycle`; docs/admission_eviction.md.

A rule is a file here and one of the same name in `torch_npu_ext/engine`; docs/extending.md says how to add one.
"""

from .age import Age as Age
from .count import Count as Count
from .idle import Idle as Idle
from .norm import Norm as Norm
from .probability import Probability as Probability
from .rows import Bytes as Bytes
from .rows import Rows as Rows
from .score import Score as Score
from .share import Share as Share
from .showclick import ShowClick as ShowClick
from .sketch import Sketch as Sketch

COLUMNS = ("count", "last_use", "score", "clicks", "timestamp")
"""The columns of a row that rules need, in the order in which tables keep them."""
