"""`BatchedDynamicEmbeddingTablesV2`: a lookup module without TorchRec's collections."""

from __future__ import annotations

from typing import Any

import torch

from ...tbe import Pooling, TableBatchedEmbedding, TableConfig, TableOptimizer
from .enums import HOMES, DynamicEmbPoolingMode
from .optimizers import check_arguments, torch_optimizer
from .options import DynamicEmbTableOptions, complete_initializer_args, row_bytes
from .rules import check_options, initial_weights, table_lifecycle
from .scored import ScoredTables
from .scores import TableScores


class BatchedDynamicEmbeddingTablesV2(ScoredTables, torch.nn.Module):
    """Dynamic tables of one lookup module, updated in the backward pass."""

    def __init__(
        self,
        table_options: list[DynamicEmbTableOptions],
        table_names: list[str] | None = None,
        feature_table_map: list[int] | None = None,
        use_index_dedup: bool = False,
        prefetch_pipeline: bool = False,
        pooling_mode: DynamicEmbPoolingMode = DynamicEmbPoolingMode.SUM,
        output_dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        **options: Any,
    ) -> None:
        """Creates the tables.

        Args:
            table_options: options of each table; `dim` and `max_capacity` are required. All must have an equal
                `get_grouped_key`.
            table_names: name of each table.
            feature_table_map: table index of each feature, in ascending order; None: one feature for each table.
            use_index_dedup, prefetch_pipeline: accepted without effect; ids are always deduplicated.
            pooling_mode: pooling of a bag.
            output_dtype: must be float32.
            device: device of the cache.
            options: arguments of the optimizer, see `optimizers.py`.

        Raises:
            ValueError, NotImplementedError: an option is invalid or unsupported; the message names it.
        """
        super().__init__()
        if not table_options or any(own != table_options[0] for own in table_options):
            raise ValueError("table_options: at least one is needed, and get_grouped_key() of all must be equal")
        names = table_names or [f"t_{index}" for index in range(len(table_options))]
        tables_by_feature = list(range(len(table_options))) if feature_table_map is None else list(feature_table_map)
        if tables_by_feature != sorted(tables_by_feature) or set(tables_by_feature) != set(range(len(table_options))):
            raise ValueError(
                f"feature_table_map is {tables_by_feature}, expected the tables in ascending order, each at least once"
            )
        chosen = check_arguments({**options, "output_dtype": output_dtype})
        self.pooling_mode = pooling_mode
        self._options = dict(zip(names, table_options, strict=True))
        self._features = [tables_by_feature.count(index) for index in range(len(names))]
        configs = [
            _table_config(name, own, features, Pooling[pooling_mode.name])
            for (name, own), features in zip(self._options.items(), self._features, strict=True)
        ]
        cls, keywords = torch_optimizer(chosen)
        optimizer = TableOptimizer.create(cls, keywords) if table_options[0].training else None
        cache = {
            name: max(1, own.local_hbm_for_values // row_bytes(own.dim or 1, _dtype(own), chosen["optimizer"]))
            for name, own in self._options.items()
            if own.local_hbm_for_values
        }
        self.embedding = TableBatchedEmbedding(configs, optimizer=optimizer, cache=cache or None, device=device)
        self._scores = {name: TableScores(self.embedding, name, own) for name, own in self._options.items()}

    def forward(
        self, indices: torch.Tensor, offsets: torch.Tensor, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Looks up a batch, with features in table order.

        Args:
            indices: ids `[n]`, ordered by feature.
            offsets: `[F * B + 1]`.
            per_sample_weights: float32 `[n]`, only for pooled tables.

        Returns:
            float32 `[B, sum of the features' dims]`, or `[n, D]` without pooling.

        Raises:
            RuntimeError: the module is in training mode, but its tables have `training=False`.
        """
        training = self.training and torch.is_grad_enabled()
        if training and not all(own.training for own in self._options.values()):
            raise RuntimeError("the tables have training=False, they are only read: call eval() first")
        result: torch.Tensor = self.embedding(indices, offsets, per_sample_weights)
        if training:
            self._record_scores(indices, offsets)
        return result

    def _record_scores(self, indices: torch.Tensor, offsets: torch.Tensor) -> None:
        ids, ends = indices.detach().cpu().long(), offsets.cpu()
        samples = (len(ends) - 1) // sum(self._features)
        begin = 0
        for name, features in zip(self._options, self._features, strict=True):
            end = begin + features * samples
            self._scores[name].record_scores(ids[int(ends[begin]) : int(ends[end])])
            begin = end

    def prefetch(
        self, indices: torch.Tensor, offsets: torch.Tensor, forward_stream: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """Plans the batch of a later training forward and starts to fetch its missing rows."""
        self.embedding.prefetch(indices, offsets)


def _dtype(options: DynamicEmbTableOptions) -> torch.dtype:
    return options.embedding_dtype or torch.float32


def _table_config(name: str, options: DynamicEmbTableOptions, features: int, pooling: Pooling) -> TableConfig:
    check_options(name, options)
    if not options.dim or not options.max_capacity:
        raise ValueError(f"table {name!r}: dim is {options.dim}, max_capacity {options.max_capacity}: both are needed")
    return TableConfig(
        name=name,
        num_embeddings=options.max_capacity,
        embedding_dim=options.dim,
        num_features=features,
        pooling=pooling,
        weight_dtype=_dtype(options),
        lifecycle=table_lifecycle(name, options, 1),
        home=HOMES[options.dist_type],
        **initial_weights(name, complete_initializer_args(options.initializer_args)),
    )
