"""Lets process groups end with `destroy_process_group`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from ..runtime.imports import after_import

# Modules of torch with functions that have `group.WORLD` as a default. DistributedDataParallel, FSDP and TorchRec
# import them.
_MODULES = (
    "torch.distributed.nn.functional",
    "torch.distributed.optim.zero_redundancy_optimizer",
    "torch.distributed.fsdp.sharded_grad_scaler",
)


def install() -> None:
    """Forgets the groups of each of these modules: now if it is imported, else when it will be."""
    for name in _MODULES:
        after_import(name, _forget_groups)


def _forget_groups(module: Any) -> None:
    """Makes None, which means the same, of the defaults that are a group.

    Python evaluates `group=group.WORLD` once, when it imports the function: None before `init_process_group`, the group
    after it. Then the function keeps the group, whose threads outlive `destroy_process_group`. One that lets go of a
    tensor while the interpreter ends aborts the process ("terminate called without an active exception").
    """
    from torch.distributed import ProcessGroup

    for function in _functions(module):
        function.__defaults__ = tuple(
            None if isinstance(default, ProcessGroup) else default for default in function.__defaults__
        )


def _functions(module: Any) -> Iterator[Any]:
    """The functions of the module and of its classes that have defaults."""
    of_module = [member for member in vars(module).values() if getattr(member, "__module__", None) == module.__name__]
    of_classes = [member for cls in of_module if inspect.isclass(cls) for member in vars(cls).values()]
    return (each for each in of_module + of_classes if inspect.isfunction(each) and each.__defaults__)
