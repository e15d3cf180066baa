"""The operators of the package, such as `ops.lookup_sequence(...)`, and helper functions for calling them."""

from .operators.calls import call_once, ops
from .operators.schemas import coefficient_names, cpu_isa, parallel_runner, select_cpu_isa
from .operators.segments import hot_segments

__all__ = ["call_once", "coefficient_names", "cpu_isa", "hot_segments", "ops", "parallel_runner", "select_cpu_isa"]
