"""Arguments of FBGEMM's constructor that are rejected or have no effect here."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from .enums import OptimType
from .optimizers import HYPER_PARAMETERS, options_read_by

logger = logging.getLogger(__name__)

IGNORED = {
    "uvm_non_rowwise_momentum": "optimizer states are part of their rows and move with them",
    "use_experimental_tbe": "there is one kernel of each operator",
    "multipass_prefetch_config": "batches are planned on the host, by as many threads as torch has",
    "uvm_host_mapped": "rows on the host are in memory of the engine's own, and staging is page-locked",
    "embedding_shard_info": "nothing here reports where a shard lies in its table",
    "res_params": "there is no raw embedding streaming",
    "stats_reporter_config": "nothing is reported: read cache_stats() and memory_report() of .tables, or use CacheLog",
}
"""Reasons that are logged for ignored arguments, by argument name."""

REFUSED = {
    "tbe_input_multiplexer_config": "look at batches before the forward",
    "enable_raw_embedding_streaming": "save deltas with rec_sdk_torch.Saver, or read .tables.view(name).chunks()",
    "is_qr_tbe": "there is no quotient-remainder module",
    "preallocated_host_buffers": "rows are stored together with their optimizer states, by the engine",
}
"""Alternatives to arguments that must keep their default, by argument name."""

_MODES_OF_OPTIMIZERS = {
    "use_rowwise_bias_correction": "Adam corrects by the updates of the table, and counts none of a row",
    "use_writeback_bwd_prehook": "gradients of equal ids are aggregated, and the update is of their sum",
    "writeback_first_feature_only": "gradients of equal ids are aggregated, and the update is of their sum",
    "precompute_writeback": "gradients of equal ids are aggregated, and the update is of their sum",
}


def check_options(arguments: Mapping[str, Any], defaults: Mapping[str, Any], optimizer: OptimType) -> None:
    """Logs arguments that are ignored here or by this optimizer.

    Raises:
        NotImplementedError: an argument is not supported; the message names an alternative.
    """
    for name, instead in REFUSED.items():
        if arguments[name] is not defaults[name] and arguments[name] != {}:
            raise NotImplementedError(f"{name}={arguments[name]!r} is not supported: {instead}")
    for name, why in _MODES_OF_OPTIMIZERS.items():
        if getattr(arguments["extra_optimizer_config"], name, False):
            raise NotImplementedError(f"extra_optimizer_config: {name}=True is not supported: {why}")
    for name, why in IGNORED.items():
        if arguments[name] != defaults[name]:
            logger.warning("%s=%r has no effect: %s", name, arguments[name], why)
    for name in sorted(HYPER_PARAMETERS.difference(options_read_by(optimizer))):
        if arguments[name] != defaults[name] and getattr(arguments[name], "name", "") != "NONE":
            logger.warning("%s=%r has no effect: %s does not use it", name, arguments[name], optimizer.name)
    if not arguments["gradient_clipping"] and arguments["max_gradient"] != defaults["max_gradient"]:
        logger.warning("max_gradient=%r has no effect without gradient_clipping=True", arguments["max_gradient"])
