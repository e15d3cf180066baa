"""Translation of dynamicemb's options to a table's initial weights and its rules of admission and eviction."""

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
    """Raises an error for options that this package's tables do not support.

    Raises:
        NotImplementedError: an option is not supported.
        ValueError: a table has no score strategy.
    """
    if options.external_storage is not None:
        raise NotImplementedError(
            f"table {name!r}: external_storage is not supported: rows are in host memory, or in files (host_store)"
        )
    if options.index_type not in (None, torch.int64, torch.int32):
        raise NotImplementedError(f"table {name!r}: index_type is {options.index_type}, ids are int64 or int32")
    if options.score_strategy is None:
        raise ValueError(f"table {name!r}: score_strategy is None, expected one of DynamicEmbScoreStrategy")


def initial_weights(name: str, args: DynamicEmbInitializerArgs) -> dict[str, Any]:
    """Returns the `TableConfig` fields that define initial weights, by name.

    Raises:
        NotImplementedError: the mode is DEBUG.
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
        f"table {name!r}: initial weights of the mode DEBUG are not supported, use CONSTANT or UNIFORM"
    )


def _admission_threshold(name: str, options: DynamicEmbTableOptions) -> int:
    """Returns the number of lookups after which an id gets a row; 0 if its first lookup is enough."""
    strategy, default = options.admit_strategy, options.eval_initializer_args.value
    if strategy is None:
        return 0
    if not isinstance(strategy, FrequencyAdmissionStrategy):
        raise NotImplementedError(
            f"table {name!r}: admit_strategy is a {type(strategy).__name__}, only "
            "FrequencyAdmissionStrategy is supported"
        )
    if not isinstance(options.admission_counter, (KVCounter, type(None))):
        raise NotImplementedError(
            f"table {name!r}: admission_counter is a {type(options.admission_counter).__name__}, only KVCounter is "
            "supported, with which the engine counts"
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
    """Returns the rules of admission and eviction of a table on `world_size` ranks.

    A full table with LFU evicts the rows with the smallest counts; with another strategy, the rows with the lowest
    scores. With STEP and TIMESTAMP all scores stay 0, so the rows that were idle longest are evicted. With CUSTOMIZED,
    `TableScores` writes the scores. Admission is always on, if only from the first lookup, so that evaluation reads
    `eval_initializer_args` for ids without a row.

    Raises:
        NotImplementedError: the admission strategy is not supported, or training and evaluation would read ids without
            a row as different weights.
    """
    assert options.score_strategy is not None
    kind, strategy = evicts_by(options.score_strategy), DynamicEmbScoreStrategy
    evicts = kind is not strategy.NO_EVICTION
    return TableLifecycle(
        admission=Count(max(1, _admission_threshold(name, options))),
        bound=Rows(options.max_capacity * world_size) if evicts and options.max_capacity else (),
        score=Score(alpha=0) if evicts and kind is not strategy.LFU else None,
        default_value=options.eval_initializer_args.value,
    )
