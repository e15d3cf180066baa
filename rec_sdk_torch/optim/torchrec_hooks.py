"""Two patches of TorchRec's optimizers; `patches/` has the other patches.

- After `import rec_sdk_torch`, an import of `torchrec.optim` adds three names to it: `AccumulateSGD`,
  `AccumulateAdagrad` and `AccumulateAdam`, as in Rec SDK's patched TorchRec. rec_sdk_torch itself does not import
  TorchRec, which takes seconds and may not be installed.
- Creating the first fused optimizer patches TorchRec's `GradientClippingOptimizer`: it then rejects a fused optimizer
  whose gradients are used up in the backward pass, and treats sharded tables as sharded parameters. TorchRec has no
  extension point for this, so the patch wraps the constructor.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from ..runtime.imports import after_import
from ..runtime.patching import is_ours, mark
from ..runtime.warn import TrainingWarning, warn

CLIP_INSTEAD = (
    "make the collection with update='step', or give apply_optimizer_in_backward gradient_clipping=True and "
    "max_gradient"
)


def install() -> None:
    """Adds the three names to `torchrec.optim`, now or as soon as it is imported."""
    after_import("torchrec.optim", _add_names)


def _add_names(optim: Any) -> None:
    from . import accumulate

    for name in ("AccumulateSGD", "AccumulateAdagrad", "AccumulateAdam"):
        setattr(optim, name, getattr(accumulate, name))


def wrap_gradient_clipping(fused_class: type) -> None:
    """Makes every GradientClippingOptimizer created from now on check for fused optimizers and sharded tables."""
    from torchrec.optim.clipping import GradientClippingOptimizer

    construct = GradientClippingOptimizer.__init__
    if is_ours(construct):
        return

    @mark
    @functools.wraps(construct)
    def construct_and_check(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, optimizer, *args, **kwargs)
        if self._clipping.value != "none":
            _raise_if_fused(optimizer, fused_class)
        if self._sharded_params:
            _move_sharded_tables(self)

    GradientClippingOptimizer.__init__ = construct_and_check


def _raise_if_fused(optimizer: Any, fused_class: type[Any]) -> None:
    """Raises if all optimizers in `optimizer` are fused and update in the backward pass; warns if only some do."""
    fused = [isinstance(leaf, fused_class) and not leaf.updates_at_step for leaf in _leaves(optimizer)]
    if fused and all(fused):
        raise ValueError(
            "GradientClippingOptimizer cannot clip a fused optimizer: its gradients are used up in the backward "
            f"pass: {CLIP_INSTEAD} instead"
        )
    if any(fused):
        warn_tables_not_clipped()


def _move_sharded_tables(clipping: Any) -> None:
    """Moves sharded tables from the replicated parameters of a GradientClippingOptimizer to its sharded ones.

    Called only if the user passed `param_to_pgs` for some of TorchRec's sharded parameters.
    """
    replicated = []
    for parameter in clipping._replicate_params:
        ranks = getattr(parameter, "ranks", None)
        if ranks is None:
            replicated.append(parameter)
        else:
            clipping._sharded_params[(ranks.rows,)].append(parameter)
    clipping._replicate_params = replicated


def _leaves(optimizer: Any) -> Iterator[Any]:
    """Yields the optimizers that `optimizer` wraps or combines."""
    from torchrec.optim.keyed import CombinedOptimizer, OptimizerWrapper

    while isinstance(optimizer, OptimizerWrapper):
        optimizer = optimizer._optimizer
    if isinstance(optimizer, CombinedOptimizer):
        for _, inner in optimizer.optimizers:
            yield from _leaves(inner)
    else:
        yield optimizer


@functools.cache
def warn_tables_not_clipped() -> None:
    """Warns, once per process, that tables are not clipped."""
    warn(
        "only gradients of dense parameters are clipped: embedding tables are updated in the backward pass; "
        f"{CLIP_INSTEAD} to clip those",
        TrainingWarning,
    )
