"""Methods of FBGEMM's module that read and set weights, optimizer states and options."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from ..tbe import TableBatchedEmbedding, TableMethods, TableOptimizer
from .enums import OptimType
from .placement import EmbeddingSpec
from .states import fill_uniform, from_fbgemm, load_states, read_only_copy, save_states, state_names, states_in_order

logger = logging.getLogger(__name__)

_STATES = "states."
_HYPER_PARAMETERS = {"lr", "eps", "beta1", "beta2", "weight_decay", "lower_bound"}


class TableAccess(TableMethods, torch.nn.Module):
    """Access to weights, states and options of the tables.

    DEVICE and HOST tables are returned as views of the rows that the kernels read and write. MANAGED and
    MANAGED_CACHING tables are returned as copies in host memory; writing to a copy raises RuntimeError.
    """

    tables: TableBatchedEmbedding
    optimizer: OptimType
    _optimizer: TableOptimizer
    _specs: list[EmbeddingSpec]

    @property
    def embedding(self) -> TableBatchedEmbedding:
        """The table-batched embedding `tables`, under the attribute name that collections use."""
        return self.tables

    def _make_ready(self) -> None:
        raise NotImplementedError

    def sync_optimizers(self) -> None:
        self._make_ready()

    def _first_features(self) -> list[int]:
        """Returns the index of the first feature that looks up each table."""
        raise NotImplementedError

    def _table_parts(self) -> list[dict[str, torch.Tensor]]:
        """Returns the weights and states of each table by name, as views or read-only copies."""
        self._make_ready()
        views = [self.tables.view(table.name) for table in self.tables.tables]
        pairs = zip(views, self._specs, strict=True)
        return [view.in_place() if spec.is_resident() else read_only_copy(view) for view, spec in pairs]

    # ---- weights

    def split_embedding_weights(self) -> list[torch.Tensor]:
        """Returns the weights of each table, `[rows, D]`, as views or copies (see the class)."""
        return [parts["weight"] for parts in self._table_parts()]

    def init_embedding_weights_uniform(self, min_val: float, max_val: float) -> None:
        """Draws all weights uniformly from `[min_val, max_val)`; on the CPU, FBGEMM draws the same numbers."""
        self._make_ready()
        for table, spec in zip(self.tables.tables, self._specs, strict=True):
            if spec.is_resident():
                self.tables.view(table.name).in_place()["weight"].uniform_(min_val, max_val)
            else:
                fill_uniform(self.tables, table.name, min_val, max_val)

    def flush(self) -> None:
        """Completes copies of rows that are in progress. Reads of tables include all updates even without this call."""
        self._make_ready()
        with self.tables.exclusive():
            for group in self.tables.groups:
                group.swap.settle()

    def reset_cache_states(self) -> None:
        """Logs that the call has no effect, because rows in the cache are never out of date."""
        logger.warning("reset_cache_states has no effect: rows of the cache are never out of date")

    # ---- states

    def split_optimizer_states(self) -> list[list[torch.Tensor]]:
        """Returns the optimizer states of each table, `[rows, D]` or `[rows]`; the states are in FBGEMM's order.

        Returns [] if the optimizer has no states.

        Raises:
            NotImplementedError: the optimizer is NONE.
        """
        if self.optimizer is OptimType.NONE:
            raise NotImplementedError("the optimizer NONE has no states: take_gradients() gives gradients of rows")
        specs = states_in_order(self._optimizer)
        if not specs:
            return []
        return [
            [parts[state.name][:, 0] if state.rowwise else parts[state.name] for state in specs]
            for parts in self._table_parts()
        ]

    def get_optimizer_state(self) -> list[dict[str, torch.Tensor]]:
        """Returns the states of each table, named as in torch's optimizers, and `iter` where FBGEMM includes it.

        Raises:
            NotImplementedError: the optimizer is NONE.
        """
        names = [state.name for state in states_in_order(self._optimizer)]
        counted = names[1:] == ["prev_iter"] or self._optimizer.options.get("counter_weight_decay_mode") == "adagradw"
        extra = {"iter": self.iter} if counted else {}
        return [dict(zip(names, states, strict=True)) | extra for states in self.split_optimizer_states()]

    # ---- options

    def set_learning_rate(self, lr: float) -> None:
        """Sets the learning rate of later updates.

        Raises:
            NotImplementedError: the optimizer is NONE.
        """
        self.update_hyper_parameters({"lr": lr})

    def get_learning_rate(self) -> float:
        """Returns the learning rate; 0 if the optimizer is NONE."""
        return float(self._optimizer.options.get("lr", 0.0))

    @property
    def iter(self) -> torch.Tensor:
        """Number of updates so far, int64 `[1]`; FBGEMM's `iter` counts forward passes instead."""
        return torch.tensor([self._optimizer.step], device="cpu")

    def update_hyper_parameters(self, params_dict: Mapping[str, float]) -> None:
        """Sets `lr`, `eps`, `beta1`, `beta2`, `weight_decay` or `lower_bound` for later updates.

        A parameter that the optimizer does not use is logged and has no effect.

        Raises:
            NotImplementedError: the name is none of these, or the optimizer is NONE; nothing is set.
        """
        unknown = sorted(set(params_dict) - _HYPER_PARAMETERS)
        if unknown or self.optimizer is OptimType.NONE:
            raise NotImplementedError(
                f"hyper-parameters {unknown or sorted(params_dict)}: {self.optimizer.name} has "
                f"{[] if self.optimizer is OptimType.NONE else sorted(_HYPER_PARAMETERS)}"
            )
        options = dict(self._optimizer.options)
        for name, value in params_dict.items():
            if name in ("beta1", "beta2") and "betas" in options:
                betas = list(options["betas"])
                betas[int(name[-1]) - 1] = value
                options["betas"] = tuple(betas)
            elif name == "lower_bound" and "gwd_lower_bound" in options:
                options["gwd_lower_bound"] = value
            elif name in ("lr", "eps", "weight_decay") and name in options:
                options[name] = value
            else:
                logger.warning(
                    "%s=%r has no effect: %s with this mode does not use it", name, value, self.optimizer.name
                )
        self._optimizer.options.update(options)

    # ---- state dicts

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the weights and optimizer states of one point in time.

        The keys are `tables.<table>.weight`, `states.<table>.<FBGEMM's state name>` and `states.iter`.
        """
        with self.tables.exclusive():
            return super().state_dict(*args, **kwargs)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for key, value in save_states(self.tables, self._optimizer).items():
            destination[f"{prefix}{_STATES}{key}"] = value

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Loads a state dict of this module, or of FBGEMM's module."""
        names = [table.name for table in self.tables.tables]
        if f"{prefix}weights_placements" in state_dict:  # only FBGEMM's state dicts have it
            try:
                from_fbgemm(state_dict, prefix, names, self._specs, self._first_features(), self._optimizer)
            except ValueError as error:
                error_msgs.append(str(error))
                return
        expected = [f"{name}.{state}" for name in names for state in state_names(self._optimizer).values()]
        saved = {key: state_dict.get(f"{prefix}{_STATES}{key}") for key in [*expected, "iter"]}
        missing = [f"{prefix}{_STATES}{key}" for key, value in saved.items() if value is None]
        missing_keys.extend(missing)
        known = {f"{prefix}{_STATES}{key}" for key in saved}
        others = [key for key in state_dict if key.startswith(prefix) and not key.startswith(f"{prefix}tables.")]
        unexpected_keys.extend(key for key in others if key not in known)
        if not missing:
            present: dict[str, torch.Tensor] = {key: value for key, value in saved.items() if value is not None}
            error_msgs.extend(load_states(self.tables, self._optimizer, present))
