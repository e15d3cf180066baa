"""Which optimizer a table was asked to have: through this package's apply, torch's, or TorchRec's, which is torch's.

torch's makes an optimizer for each parameter, and records on the parameter that, its class and its keywords, in three
lists. The last of them checks each entry, so that a request that a table cannot meet is an error at the call.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from ..formulas import class_name, spec_for
from ..tbe import TableOptimizer

OPTIMIZERS, CLASSES, KEYWORDS = ATTRIBUTES = ("_in_backward_optimizers", "_optimizer_classes", "_optimizer_kwargs")
"""The attributes that torch records an optimizer in, the last one last."""


class Handle(Protocol):
    """A table's parameter, which requests are recorded on."""

    table: str
    embedding_optimizer_cls: type | None
    sharded: bool

    @property
    def updates_at_step(self) -> bool: ...

    def assignments(self) -> list[tuple[type, dict[str, Any]]]: ...


def assignments_of(parameter: object) -> list[tuple[type, dict[str, Any]]]:
    """Optimizer classes and keywords that were applied to a parameter, of any module, in order."""
    attributes = vars(parameter)
    return list(zip(attributes.get(CLASSES, []), attributes.get(KEYWORDS, []), strict=True))


class CheckedKeywords(list[dict[str, Any]]):
    """The keywords of a handle's optimizers; what torch adds is checked, and a request that fails leaves no trace."""

    def __init__(self, handle: Handle, values: Iterable[dict[str, Any]] = ()) -> None:
        super().__init__(values)
        self._handle = weakref.ref(handle)

    def append(self, keywords: dict[str, Any]) -> None:
        """Adds the keywords of the optimizer whose class was added before.

        Raises:
            TypeError, ValueError, RuntimeError: see `check`.
        """
        super().append(keywords)
        handle = self._handle()
        if handle is None:
            return
        try:
            optimizer_class = handle.__dict__[CLASSES][-1]
            made = check(handle, optimizer_class, keywords, handle.assignments()[:-1])
            optimizer = handle.__dict__[OPTIMIZERS][-1]
            if not hasattr(optimizer, "param_groups"):  # TorchRec's placeholders
                optimizer.param_groups = [{"params": [handle], **made.options}]
            (group,) = optimizer.param_groups
            # torch filled in its own defaults, which need not be those of tables
            group.update({name: made.options[name] for name in made.options.keys() - keywords.keys()})
            if decouples(optimizer_class, keywords, handle.sharded):
                group["decoupled_weight_decay"] = True
            optimizer.defaults = defaults_of([made])
            made.check_options(group)
        except BaseException:
            remove_last(handle)
            raise


def defaults_of(optimizers: Sequence[TableOptimizer]) -> dict[str, Any]:
    """`defaults` of a torch optimizer that stands for these: options that all have, with the first one's values.

    Schedulers look there for what they may change: those that cycle a momentum (OneCycleLR, CyclicLR) for `betas` or
    `momentum`, and raise where there is neither.
    """
    common = set.intersection(*(set(optimizer.spec.options) for optimizer in optimizers))
    return {name: value for name, value in optimizers[0].options.items() if name in common}


def record(handle: Handle, optimizer_class: type, keywords: dict[str, Any]) -> None:
    """Notes a request that was checked, without an optimizer object: the engine is the optimizer."""
    handle.__dict__.setdefault(OPTIMIZERS, [])
    handle.__dict__.setdefault(CLASSES, []).append(optimizer_class)
    list.append(handle.__dict__.setdefault(KEYWORDS, CheckedKeywords(handle)), keywords)


def remove_last(handle: Handle) -> None:
    """Takes back the last request, which torch recorded."""
    for name in ATTRIBUTES:
        del handle.__dict__[name][-1:]
    if not handle.assignments():
        for name in ATTRIBUTES:
            del handle.__dict__[name]


def check(
    handle: Handle,
    optimizer_class: type,
    keywords: Mapping[str, Any],
    earlier: Iterable[tuple[type, Mapping[str, Any]]],
) -> TableOptimizer:
    """The optimizer that a table can have, where it was asked for those `earlier`.

    Raises:
        TypeError: the fused update does not know the class or a keyword, a value of the wrong type, or a class that is
            not of the family of the table's `embedding_optimizer_cls`.
        ValueError: a value out of range, or a keyword that the fused update cannot honour.
        RuntimeError: the table has another optimizer, or the same with other keywords.
    """
    spec = spec_for(optimizer_class)
    made_for = handle.embedding_optimizer_cls
    if made_for is not None and spec_for(made_for).family != spec.family:
        raise TypeError(
            f"table {handle.table!r} was made with embedding_optimizer_cls={class_name(made_for)}, but "
            f"apply_optimizer_in_backward gives it {class_name(optimizer_class)}: change one of the two"
        )
    where = f"table {handle.table!r}, {optimizer_class.__name__}"
    optimizer = TableOptimizer.create(*effective_optimizer(optimizer_class, keywords, handle.sharded), where)
    if handle.updates_at_step:
        optimizer.check_deferrable()
    for given, options in earlier:
        if given is not optimizer_class or options != dict(keywords):
            raise RuntimeError(
                f"table {handle.table!r} already has {class_name(given)} with {options}; "
                f"{class_name(optimizer_class)} with {dict(keywords)} cannot be applied on top"
            )
    return optimizer


def is_hooked(handle: Handle) -> bool:
    """Whether the optimizer is to act in the backward pass: torch's apply can be told that it is not."""
    if not handle.__dict__.get(OPTIMIZERS):
        return True
    return handle in _hooks()


def _hooks() -> Any:
    """Returns the hooks of each parameter that torch's apply has registered."""
    # imported here: torch compiles eight optimizers as it imports this, a third of a second
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    return param_to_optim_hook_handle_map


def _remove_hooks(handle: Handle) -> None:
    """Removes torch's hooks, which would call `step()` of optimizers that have no rows, and set the gradient to None.

    Raises:
        RuntimeError: there are none.
    """
    if handle.__dict__.get(OPTIMIZERS) and is_hooked(handle):
        for hook in _hooks()[handle]:
            hook.remove()
    if not is_hooked(handle):
        while handle.assignments():
            remove_last(handle)
        raise RuntimeError(
            f"table {handle.table!r} was given its optimizer with register_hook=False, but rows are only updated in "
            "the backward pass: apply it again without register_hook=False"
        )


def share_options(handle: Handle, optimizer: TableOptimizer) -> None:
    """Lets the param_groups of the optimizers that torch made for a table be the live options of the update."""
    for made in handle.__dict__[OPTIMIZERS]:
        made.param_groups[0] = optimizer.options
        made._opt_called = True  # a scheduler warns of its first step before the optimizer's: backward passes are those


def table_optimizers(handles: Mapping[str, Handle]) -> dict[str, TableOptimizer]:
    """The optimizer of each table that has one: one for all tables of a call of ours, one for each table of torch's.

    Raises:
        TypeError, ValueError, RuntimeError: see `check`.
    """
    shared: list[tuple[dict[str, Any], TableOptimizer]] = []
    result: dict[str, TableOptimizer] = {}
    for name, handle in handles.items():
        assignments = handle.assignments()
        if not assignments:
            continue
        _remove_hooks(handle)
        cls, keywords = assignments[0]
        optimizer = check(handle, cls, keywords, assignments[1:])
        if handle.__dict__[OPTIMIZERS]:
            group = handle.__dict__[OPTIMIZERS][0].param_groups[0]
            for option, value in optimizer.options.items():
                group.setdefault(option, value)
            optimizer.options = group  # as it may have been changed by now
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


# ---- optimizers of TorchRec's sharded tables, which are FBGEMM's

_DEFAULTS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 1e-2},
    "Adagrad": {"lr": 1e-2, "eps": 1e-8},
    "RowWiseAdagrad": {"lr": 1e-2, "eps": 1e-8},
    "Adam": {"lr": 1e-2},
}
"""Defaults that FBGEMM has and the class of torch has not, by the name of the class."""


def _is_torchrec_optimizer(cls: type) -> bool:
    """Whether TorchRec makes one of FBGEMM's optimizers of the class."""
    return class_name(cls).startswith(("torch.optim.", "torchrec.optim.")) and cls.__name__ in _DEFAULTS


def decouples(cls: type, keywords: Mapping[str, Any], sharded: bool) -> bool:
    """Whether it is Adam with weight decay of a sharded table, which FBGEMM decouples as AdamW does.

    torch adds it to the gradient, and so does a table that is not sharded.
    """
    return sharded and cls.__name__ == "Adam" and _is_torchrec_optimizer(cls) and bool(keywords.get("weight_decay"))


def effective_optimizer(cls: type, keywords: Mapping[str, Any], sharded: bool) -> tuple[type, dict[str, Any]]:
    """The class whose formula the update has, and the keywords, with FBGEMM's defaults if the table is sharded."""
    defaults = _DEFAULTS[cls.__name__] if sharded and _is_torchrec_optimizer(cls) else {}
    options = {**defaults, **keywords}
    if not decouples(cls, keywords, sharded):
        return cls, options
    options.pop("decoupled_weight_decay", None)  # torch's Adam has it, as False
    return torch.optim.AdamW, options
