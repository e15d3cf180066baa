"""Changes TorchRec's optimizers, in two places; `patches/` has the other changes.

- `import rec_sdk_torch` adds three names to `torchrec.optim`, as soon as that is imported: `AccumulateSGD`,
  `AccumulateAdagrad`, `AccumulateAdam`, as in Rec SDK's patched TorchRec. TorchRec is not imported for it: that takes
  seconds, and it may be missing.
- Making a fused optimizer of ours (not importing anything) lets TorchRec's `GradientClippingOptimizer` refuse to wrap
  one whose gradients it never sees, and know which tables are divided among ranks. TorchRec has no place to ask for
  that, so its constructor is wrapped.
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
    """Adds the names to `torchrec.optim` now if it is imported, else when it will be."""
    after_import("torchrec.optim", _extend)


def _extend(optim: Any) -> None:
    from . import accumulate

    for name in ("AccumulateSGD", "AccumulateAdagrad", "AccumulateAdam"):
        setattr(optim, name, getattr(accumulate, name))


def wrap_gradient_clipping(fused_class: type) -> None:
    """Lets every GradientClippingOptimizer made from now on look for fused optimizers; called when one is made."""
    from torchrec.optim.clipping import GradientClippingOptimizer

    construct = GradientClippingOptimizer.__init__
    if is_ours(construct):
        return

    @mark
    @functools.wraps(construct)
    def checked(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, optimizer, *args, **kwargs)
        if self._clipping.value != "none":
            _raise_if_fused(optimizer, fused_class)
        if self._sharded_params:
            _move_sharded_tables(self)

    GradientClippingOptimizer.__init__ = checked


def _raise_if_fused(optimizer: Any, fused_class: type[Any]) -> None:
    """Raises for fused optimizers that update in the backward pass, bare, wrapped or combined; warns for one that is
    combined with others.
    """
    fused = [isinstance(leaf, fused_class) and not leaf.updates_at_step for leaf in _leaves(optimizer)]
    if fused and all(fused):
        raise ValueError(
            "GradientClippingOptimizer cannot clip a fused optimizer: its gradients are used up in the backward "
            f"pass: {CLIP_INSTEAD} instead"
        )
    if any(fused):
        warn_tables_not_clipped()


def _move_sharded_tables(clipping: Any) -> None:
    """Puts tables that are divided among ranks with TorchRec's own, where `param_to_pgs` has named some of these."""
    replicated = []
    for parameter in clipping._replicate_params:
        ranks = getattr(parameter, "ranks", None)
        if ranks is None:
            replicated.append(parameter)
        else:
            clipping._sharded_params[(ranks.rows,)].append(parameter)
    clipping._replicate_params = replicated


def _leaves(optimizer: Any) -> Iterator[Any]:
    """The optimizers that are wrapped and combined in `optimizer`."""
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
    """Says so once."""
    warn(
        "gradients are clipped of the dense parameters only: embedding tables are updated in the backward pass; "
        f"{CLIP_INSTEAD} to clip those",
        TrainingWarning,
    )
