"""Rules of admission and eviction for the ids of hash tables: the options of `TableLifecycle`.

docs/admission_eviction.md explains them. Each rule is a file here and a file of the same name in
`torch_npu_ext/engine/rules`; docs/extending.md shows how to add one.
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
"""The columns of a row that rules may need, in the order in which tables store them."""
