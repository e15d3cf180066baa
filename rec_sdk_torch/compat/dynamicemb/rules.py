"""Options of dynamicemb as those of a table here: its initial weights, which ids get a row, which leave."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...rules import Count, Rows, Score
from ...tbe import InitializerType, TableLifecycle
from .admission import FrequencyAdmissionStrategy, KVCounter
from .enums import DynamicEmbInitializerArgs, DynamicEmbInitializerMode, DynamicEmbScoreStrategy, evicts_by
from .options import DynamicEmbTableOptions


def check_options(name: str, options: DynamicEmbTableOptions) -> None:
    """Refuses options that have no counterpart here.

    Raises:
        NotImplementedError: one that has none.
        ValueError: a table without a score strategy.
    """
    if options.external_storage is not None:
        raise NotImplementedError(
            f"table {name!r}: external_storage is not here: rows live in host memory, or in files (host_store)"
        )
    if options.index_type not in (None, torch.int64, torch.int32):
        raise NotImplementedError(f"table {name!r}: index_type is {options.index_type}, ids are int64 or int32")
    if options.score_strategy is None:
        raise ValueError(f"table {name!r}: score_strategy is None, expected one of DynamicEmbScoreStrategy")


def initial_weights(name: str, args: DynamicEmbInitializerArgs) -> dict[str, Any]:
    """Fields of `TableConfig` for initial weights.

    Raises:
        NotImplementedError: the mode DEBUG.
    """
    mode = DynamicEmbInitializerMode
    if args.mode is mode.UNIFORM:
        return {"initializer_type": InitializerType.UNIFORM, "init_min": args.lower, "init_max": args.upper}
    if args.mode is mode.CONSTANT:
        return {"initializer_type": InitializerType.LINEAR, "init_min": args.value, "init_max": args.value}
    if args.mode is mode.NORMAL:
        return {"init_fn": functools.partial(torch.nn.init.normal_, mean=args.mean, std=args.std_dev)}
    if args.mode is mode.TRUNCATED_NORMAL:
        low = 0.0 if args.lower is None else args.lower
        high = 1.0 if args.upper is None else args.upper
        draw = functools.partial(torch.nn.init.trunc_normal_, mean=args.mean, std=args.std_dev, a=low, b=high)
        return {"init_fn": draw}
    raise NotImplementedError(
        f"table {name!r}: initial weights of the mode DEBUG are not here, use CONSTANT or UNIFORM"
    )


def _admission(name: str, options: DynamicEmbTableOptions) -> int:
    """How often an id has to be looked up before it has a row; 0 or 1: once."""
    strategy, default = options.admit_strategy, options.eval_initializer_args.value
    if strategy is None:
        return 0
    if not isinstance(strategy, FrequencyAdmissionStrategy):
        raise NotImplementedError(
            f"table {name!r}: admit_strategy is a {type(strategy).__name__}, the engine admits by "
            "FrequencyAdmissionStrategy alone"
        )
    if not isinstance(options.admission_counter, (KVCounter, type(None))):
        raise NotImplementedError(
            f"table {name!r}: admission_counter is a {type(options.admission_counter).__name__}, the engine counts: "
            "give it KVCounter"
        )
    if strategy.threshold <= 1:
        return 0
    args = strategy.initializer_args or options.initializer_args
    if args.mode is not DynamicEmbInitializerMode.CONSTANT or args.value != default:
        raise NotImplementedError(
            f"table {name!r}: ids that are not admitted would be read as {args.mode.name} in training and as {default} "
            "in evaluation. Here both read one number: give FrequencyAdmissionStrategy "
            f"initializer_args=DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.CONSTANT, value={default})"
        )
    return strategy.threshold


def table_lifecycle(name: str, options: DynamicEmbTableOptions, world_size: int) -> TableLifecycle:
    """Returns the rules of a table on `world_size` ranks.

    Rows leave by their count (LFU), or by their score. It is 0 for each row, so that those leave which were idle for
    longest (STEP, TIMESTAMP), unless `TableScores` writes it (CUSTOMIZED). Admission is always on, if only from the
    first lookup, so that an id without a row is read in evaluation as the options say.

    Raises:
        NotImplementedError: admission by another strategy, or one that reads ids as something else than a number.
    """
    assert options.score_strategy is not None
    kind, strategy = evicts_by(options.score_strategy), DynamicEmbScoreStrategy
    evicts = kind is not strategy.NO_EVICTION
    return TableLifecycle(
        admission=Count(max(1, _admission(name, options))),
        bound=Rows(options.max_capacity * world_size) if evicts and options.max_capacity else (),
        score=Score(alpha=0) if evicts and kind is not strategy.LFU else None,
        default_value=options.eval_initializer_args.value,
    )
