"""Optimizer assignments: the optimizer classes and keywords that were applied to a table's parameter.

Assignments are made by `apply_optimizer_in_backward` of this package or of torch; TorchRec re-exports torch's. torch's
function creates an optimizer for each parameter, and appends the optimizer, its class and its keywords to three lists
that are attributes of the parameter. For tables, the list of keywords checks each entry, so that an invalid assignment
raises an error at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from ..formulas import class_name, spec_for
from ..tbe import TableOptimizer

OPTIMIZERS, CLASSES, KEYWORDS = ATTRIBUTES = ("_in_backward_optimizers", "_optimizer_classes", "_optimizer_kwargs")
"""Attributes in which torch stores a parameter's optimizers, in the order in which torch writes to them."""


class Handle(Protocol):
    """Interface of a table's parameter, which stores assignments."""

    table: str
    embedding_optimizer_cls: type | None
    sharded: bool

    @property
    def updates_at_step(self) -> bool: ...

    def assignments(self) -> list[tuple[type, dict[str, Any]]]: ...


def assignments_of(parameter: object) -> list[tuple[type, dict[str, Any]]]:
    """Returns the optimizer classes and keywords that were applied to a parameter of any module, in order."""
    attributes = vars(parameter)
    return list(zip(attributes.get(CLASSES, []), attributes.get(KEYWORDS, []), strict=True))


class CheckedKeywords(list[dict[str, Any]]):
    """List of the keywords of a table's optimizers, which checks each entry that torch appends.

    If the check of an entry fails, the whole assignment is removed.
    """

    def __init__(self, handle: Handle, values: Iterable[dict[str, Any]] = ()) -> None:
        super().__init__(values)
        self._handle = weakref.ref(handle)

    def append(self, keywords: dict[str, Any]) -> None:
        """Appends the keywords of the optimizer whose class torch appended last.

        Raises:
            TypeError, ValueError, RuntimeError: see `check_assignment`.
        """
        super().append(keywords)
        handle = self._handle()
        if handle is None:
            return
        try:
            optimizer_class = handle.__dict__[CLASSES][-1]
            made = check_assignment(handle, optimizer_class, keywords, handle.assignments()[:-1])
            optimizer = handle.__dict__[OPTIMIZERS][-1]
            if not hasattr(optimizer, "param_groups"):  # TorchRec's placeholder classes
                optimizer.param_groups = [{"params": [handle], **made.options}]
            (group,) = optimizer.param_groups
            # The group contains torch's defaults, which may differ from the defaults for tables.
            group.update({name: made.options[name] for name in made.options.keys() - keywords.keys()})
            if decouples_weight_decay(optimizer_class, keywords, handle.sharded):
                group["decoupled_weight_decay"] = True
            optimizer.defaults = defaults_of([made])
            made.check_options(group)
        except BaseException:
            remove_last_assignment(handle)
            raise


def defaults_of(optimizers: Sequence[TableOptimizer]) -> dict[str, Any]:
    """Returns the attribute `defaults` for a torch optimizer that represents `optimizers`.

    It contains the options that all of the optimizers have, with the values of the first optimizer. Schedulers look up
    in `defaults` which options they may change: OneCycleLR and CyclicLR cycle `betas` or `momentum`, and raise an error
    if neither is there.
    """
    common = set.intersection(*(set(optimizer.spec.options) for optimizer in optimizers))
    return {name: value for name, value in optimizers[0].options.items() if name in common}


def add_assignment(handle: Handle, optimizer_class: type, keywords: dict[str, Any]) -> None:
    """Adds an assignment that was already checked, without an optimizer object: the engine performs the updates."""
    handle.__dict__.setdefault(OPTIMIZERS, [])
    handle.__dict__.setdefault(CLASSES, []).append(optimizer_class)
    list.append(handle.__dict__.setdefault(KEYWORDS, CheckedKeywords(handle)), keywords)


def remove_last_assignment(handle: Handle) -> None:
    """Removes the assignment that torch added last."""
    for name in ATTRIBUTES:
        del handle.__dict__[name][-1:]
    if not handle.assignments():
        for name in ATTRIBUTES:
            del handle.__dict__[name]


def check_assignment(
    handle: Handle,
    optimizer_class: type,
    keywords: Mapping[str, Any],
    earlier: Iterable[tuple[type, Mapping[str, Any]]],
) -> TableOptimizer:
    """Returns the optimizer of a table for a class and keywords, given its `earlier` assignments.

    Raises:
        TypeError: the fused update does not support the class or a keyword, a value has the wrong type, or the class is
            not of the family of the table's `embedding_optimizer_cls`.
        ValueError: a value is out of range, or a keyword is not supported by the fused update.
        RuntimeError: the table has another optimizer, or the same optimizer with other keywords.
    """
    spec = spec_for(optimizer_class)
    allowed = handle.embedding_optimizer_cls
    if allowed is not None and spec_for(allowed).family != spec.family:
        raise TypeError(
            f"table {handle.table!r} was made with embedding_optimizer_cls={class_name(allowed)}, but "
            f"apply_optimizer_in_backward gives it {class_name(optimizer_class)}: change one of the two"
        )
    where = f"table {handle.table!r}, {optimizer_class.__name__}"
    optimizer = TableOptimizer.create(*effective_optimizer(optimizer_class, keywords, handle.sharded), where)
    if handle.updates_at_step:
        optimizer.check_deferrable()
    for applied, options in earlier:
        if applied is not optimizer_class or options != dict(keywords):
            raise RuntimeError(
                f"table {handle.table!r} already has {class_name(applied)} with {options}; "
                f"{class_name(optimizer_class)} with {dict(keywords)} cannot be applied on top"
            )
    return optimizer


def is_hooked(handle: Handle) -> bool:
    """Returns whether the optimizer runs in the backward pass; False if torch was called with register_hook=False."""
    if not handle.__dict__.get(OPTIMIZERS):
        return True
    return handle in _hooks()


def _hooks() -> Any:
    """Returns the hooks that torch's `apply_optimizer_in_backward` has registered, by parameter."""
    # Imported only when needed: the import makes torch compile eight optimizers, which takes a third of a second.
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    return param_to_optim_hook_handle_map


def _remove_hooks(handle: Handle) -> None:
    """Removes torch's hooks, which would call `step()` of an optimizer without rows and set the gradient to None.

    Raises:
        RuntimeError: torch registered no hooks (register_hook=False).
    """
    if handle.__dict__.get(OPTIMIZERS) and is_hooked(handle):
        for hook in _hooks()[handle]:
            hook.remove()
    if not is_hooked(handle):
        while handle.assignments():
            remove_last_assignment(handle)
        raise RuntimeError(
            f"table {handle.table!r} was given its optimizer with register_hook=False, but rows are only updated in "
            "the backward pass: apply it again without register_hook=False"
        )


def share_options(handle: Handle, optimizer: TableOptimizer) -> None:
    """Replaces the param_groups of torch's optimizers for a table with the options that the table's updates read."""
    for made in handle.__dict__[OPTIMIZERS]:
        made.param_groups[0] = optimizer.options
        made._opt_called = True  # otherwise a scheduler would warn that step() was not called


def table_optimizers(handles: Mapping[str, Handle]) -> dict[str, TableOptimizer]:
    """Returns the optimizers of the tables that have one, by table name.

    All tables in one call of this package's `apply_optimizer_in_backward` share an optimizer. torch's function creates
    one optimizer for each table.

    Raises:
        TypeError, ValueError, RuntimeError: see `check_assignment`.
    """
    shared: list[tuple[dict[str, Any], TableOptimizer]] = []
    result: dict[str, TableOptimizer] = {}
    for name, handle in handles.items():
        assignments = handle.assignments()
        if not assignments:
            continue
        _remove_hooks(handle)
        cls, keywords = assignments[0]
        optimizer = check_assignment(handle, cls, keywords, assignments[1:])
        if handle.__dict__[OPTIMIZERS]:
            group = handle.__dict__[OPTIMIZERS][0].param_groups[0]
            for option, value in optimizer.options.items():
                group.setdefault(option, value)
            optimizer.options = group  # the user may have changed these options already
            share_options(handle, optimizer)
        else:
            for other, made in shared:
                if other is keywords:
                    optimizer = made
                    break
            else:
                shared.append((keywords, optimizer))
        result[name] = optimizer
    return result


# ---- FBGEMM's conventions, which TorchRec's sharded tables follow

_DEFAULTS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 1e-2},
    "Adagrad": {"lr": 1e-2, "eps": 1e-8},
    "RowWiseAdagrad": {"lr": 1e-2, "eps": 1e-8},
    "Adam": {"lr": 1e-2},
}
"""Defaults of FBGEMM's optimizers that differ from torch's defaults, by class name."""


def _is_torchrec_optimizer(cls: type) -> bool:
    """Returns whether TorchRec replaces the class with one of FBGEMM's optimizers, with the defaults above."""
    return class_name(cls).startswith(("torch.optim.", "torchrec.optim.")) and cls.__name__ in _DEFAULTS


def decouples_weight_decay(cls: type, keywords: Mapping[str, Any], sharded: bool) -> bool:
    """Returns whether weight decay is decoupled as in AdamW; as in FBGEMM, it is for Adam of a sharded table.

    torch's Adam adds the weight decay to the gradient, and so does Adam of an unsharded table.
    """
    return sharded and cls.__name__ == "Adam" and _is_torchrec_optimizer(cls) and bool(keywords.get("weight_decay"))


def effective_optimizer(cls: type, keywords: Mapping[str, Any], sharded: bool) -> tuple[type, dict[str, Any]]:
    """Returns the class whose formula the update uses, and its keywords. A sharded table has FBGEMM's defaults."""
    defaults = _DEFAULTS[cls.__name__] if sharded and _is_torchrec_optimizer(cls) else {}
    options = {**defaults, **keywords}
    if not decouples_weight_decay(cls, keywords, sharded):
        return cls, options
    options.pop("decoupled_weight_decay", None)  # False in torch's Adam
    return torch.optim.AdamW, options
