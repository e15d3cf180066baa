"""Patches torch functions that keep a process group alive after `destroy_process_group`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from ..runtime.imports import after_import

# Modules of torch with functions that have `group.WORLD` as a default.
# DistributedDataParallel, FSDP and TorchRec import these modules.
_MODULES = (
    "torch.distributed.nn.functional",
    "torch.distributed.optim.zero_redundancy_optimizer",
    "torch.distributed.fsdp.sharded_grad_scaler",
)


def install() -> None:
    """Removes process groups from the default arguments in `_MODULES`, now or as soon as the modules are imported."""
    for name in _MODULES:
        after_import(name, _remove_default_groups)


def _remove_default_groups(module: Any) -> None:
    """Replaces each default argument that is a process group by None, which also selects the default group.

    Python evaluates `group=group.WORLD` once, when the module is imported: the default is None before
    `init_process_group` and the group after it. In the second case, the function keeps the group and its threads alive.
    Such a thread aborts the process if it frees a tensor while the interpreter exits ("terminate called without an
    active exception").
    """
    from torch.distributed import ProcessGroup

    for function in _functions_with_defaults(module):
        function.__defaults__ = tuple(
            None if isinstance(default, ProcessGroup) else default for default in function.__defaults__
        )


def _functions_with_defaults(module: Any) -> Iterator[Any]:
    """Returns the functions with default arguments in a module and its classes."""
    of_module = [member for member in vars(module).values() if getattr(member, "__module__", None) == module.__name__]
    of_classes = [member for cls in of_module if inspect.isclass(cls) for member in vars(cls).values()]
    return (each for each in of_module + of_classes if inspect.isfunction(each) and each.__defaults__)
