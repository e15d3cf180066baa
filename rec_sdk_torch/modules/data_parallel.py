"""A patch of torch's DistributedDataParallel that makes it ignore tables.

A table's parameter never gets a gradient, and it has the attributes of an optimizer in backward. Without the patch,
DistributedDataParallel would wait for the gradient and, because of the attributes, would stop reducing dense gradients.
It accepts a list of parameter names to ignore, but only as an attribute of the wrapped module, to which a collection
inside has no access. So creating the first collection wraps the constructor of DistributedDataParallel.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ..optim.handles import TableHandle
from ..runtime.patching import is_ours, mark
from ..runtime.warn import TrainingWarning, warn

_IGNORED = "_ddp_params_and_buffers_to_ignore"


def exclude_tables() -> None:
    """Makes every DistributedDataParallel created from now on ignore the tables inside its module."""
    construct = DistributedDataParallel.__init__
    if is_ours(construct):
        return

    @mark
    @functools.wraps(construct)
    def construct_without_tables(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        handles = {name: part for name, part in module.named_modules() if isinstance(part, TableHandle)}
        if not handles:
            construct(self, module, *args, **kwargs)
            return
        untrained = [part.table for part in handles.values() if not (part.sharded or part.weight.assignments())]
        if untrained and module.training:
            raise RuntimeError(
                f"tables {untrained} have no optimizer, and an optimizer of DistributedDataParallel's parameters does "
                "not train them: rows are updated in the backward pass. Call apply_optimizer_in_backward on their "
                "parameters first, and shard the model with DistributedModelParallel and "
                "get_default_hybrid_sharders(host_env); for a reference that is trained as dense parameters are, use "
                "torchrec.EmbeddingBagCollection; to read only, call eval() on the model"
            )
        was_set = _IGNORED in module.__dict__
        before = getattr(module, _IGNORED, ())
        names = [f"{prefix}.{name}" for prefix, part in handles.items() for name in part.state_names()]
        setattr(module, _IGNORED, [*before, *names])
        try:
            construct(self, module, *args, **kwargs)
        finally:
            if was_set:
                setattr(module, _IGNORED, before)
            else:
                delattr(module, _IGNORED)
        unsharded = tuple(part.table for part in handles.values() if not part.sharded)
        if unsharded and torch.distributed.get_world_size(self.process_group) > 1:
            _warn_per_rank(unsharded)
            for part in handles.values():
                part.weight.differs_by_rank = not part.sharded

    DistributedDataParallel.__init__ = construct_without_tables  # type: ignore[method-assign]


@functools.cache
def _warn_per_rank(tables: tuple[str, ...]) -> None:
    warn(
        f"DistributedDataParallel averages the gradients of dense parameters only: tables {list(tables)} are each "
        "rank's own, and diverge; DistributedModelParallel with get_default_hybrid_sharders(host_env) shards them",
        TrainingWarning,
    )
