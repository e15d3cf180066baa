"""`SplitTableBatchedEmbeddingBagsCodegen`: FBGEMM's constructor and methods, implemented with this package's tables."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..runtime.eager import check_batch, eager
from ..runtime.warn import InputWarning, warn
from ..tbe import EmbeddingOptions, Group, Prefetched, TableBatchedEmbedding
from .access import TableAccess
from .batches import BatchSizes, FeatureOrder, VariableBatch, mask_weight_gradients, repair_batch
from .counters import CountsCache
from .enums import (
    BoundsCheckMode,
    CacheAlgorithm,
    EmainplaceModeDefinition,
    OptimType,
    PoolingMode,
    RecordCacheMetrics,
    SparseType,
    WeightDecayMode,
    member,
    sparse_type,
)
from .moving_average import MovingAverage
from .optimizers import gradient_bound, table_optimizer
from .options import check_options
from .placement import cache_option, compute_device, derive_table_names, make_resident, parse_specs, table_configs

logger = logging.getLogger(__name__)

_REPAIRING_MODES = (BoundsCheckMode.WARNING, BoundsCheckMode.IGNORE)


class SplitTableBatchedEmbeddingBagsCodegen(TableAccess, CountsCache):
    """FBGEMM's module of this name, for training on the CPU, CUDA and NPU.

    An option is supported, rejected with a reason, or ignored with one logged line (by loggers under
    `rec_sdk_torch.fbgemm`); docs/fbgemm.md lists all options. A member of an enum may be FBGEMM's, this package's, or
    the member's name.

    Attributes:
        tables: the `TableBatchedEmbedding` that contains the rows.
    """

    def __init__(
        self,
        embedding_specs: Sequence[Sequence[Any]],
        feature_table_map: Sequence[int] | None = None,
        cache_algorithm: Any = CacheAlgorithm.LRU,
        cache_load_factor: float = 0.2,
        cache_sets: int = 0,
        cache_reserved_memory: float = 0.0,
        cache_precision: Any = None,
        weights_precision: Any = SparseType.FP32,
        output_dtype: Any = SparseType.FP32,
        enforce_hbm: bool = False,
        optimizer: Any = OptimType.EXACT_SGD,
        record_cache_metrics: Any = None,
        gather_uvm_cache_stats: bool | None = False,
        stochastic_rounding: bool = True,
        gradient_clipping: bool = False,
        max_gradient: float = 1.0,
        max_norm: float = 0.0,
        learning_rate: float = 0.01,
        eps: float = 1.0e-8,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        weight_decay_mode: Any = WeightDecayMode.NONE,
        eta: float = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        ensemble_mode: Any = None,
        emainplace_mode: Any = None,
        counter_based_regularization: Any = None,
        cowclip_regularization: Any = None,
        pooling_mode: Any = PoolingMode.SUM,
        device: str | int | torch.device | None = None,
        bounds_check_mode: Any = BoundsCheckMode.WARNING,
        uvm_non_rowwise_momentum: bool = False,
        use_experimental_tbe: bool = False,
        prefetch_pipeline: bool = False,
        stats_reporter_config: Any = None,
        table_names: Sequence[str] | None = None,
        optimizer_state_dtypes: Mapping[str, Any] | None = None,
        multipass_prefetch_config: Any = None,
        global_weight_decay: Any = None,
        uvm_host_mapped: bool = False,
        extra_optimizer_config: Any = None,
        tbe_input_multiplexer_config: Any = None,
        embedding_table_index_type: torch.dtype = torch.int64,
        embedding_table_offset_type: torch.dtype = torch.int64,
        embedding_shard_info: Sequence[tuple[int, int, int, int]] | None = None,
        enable_raw_embedding_streaming: bool = False,
        res_params: Any = None,
        is_qr_tbe: bool = False,
        preallocated_host_buffers: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Creates the module with FBGEMM's arguments, see docs/fbgemm.md. Nothing is allocated before the first use.

        Args:
            embedding_specs: (rows, dim, `EmbeddingLocation`, `ComputeDevice`) of each table; `dim` need not be a
                multiple of 4.

        Raises:
            NotImplementedError: an argument or a value is not supported; the message gives the reason.
            TypeError, ValueError: a value is invalid.
            RuntimeError: the compute device is CUDA, but torch has no accelerator.
        """
        arguments = dict(locals())
        super().__init__()
        self.optimizer = member(OptimType, "optimizer", optimizer)
        self._optimizer = table_optimizer(self.optimizer, arguments)
        self._gradient_bound = gradient_bound(arguments)
        check_options(arguments, _DEFAULTS, self.optimizer)
        for name in ("embedding_table_index_type", "embedding_table_offset_type"):
            if arguments[name] not in (torch.int32, torch.int64):
                raise ValueError(f"{name} is {arguments[name]}, allowed are torch.int32 and torch.int64")
        self.weights_precision = sparse_type("weights_precision", weights_precision)
        cached = weights_precision if cache_precision is None else cache_precision
        self.cache_precision = sparse_type("cache_precision", cached)
        self._output = sparse_type("output_dtype", output_dtype).as_dtype()
        self.pooling_mode = member(PoolingMode, "pooling_mode", pooling_mode)
        bounds_check = member(BoundsCheckMode, "bounds_check_mode", bounds_check_mode)
        self.bounds_check_mode = BoundsCheckMode[bounds_check.name.removeprefix("V2_")]
        self.prefetch_pipeline = prefetch_pipeline
        self.stochastic_rounding = stochastic_rounding
        self._specs, kind = parse_specs(embedding_specs, enforce_hbm)
        self.embedding_specs = list(embedding_specs)
        self._average: MovingAverage | None = None
        if self.optimizer is OptimType.EMAINPLACE_ROWWISE_ADAGRAD:
            self._average = MovingAverage(emainplace_mode or EmainplaceModeDefinition(), self._specs)
        self._order = FeatureOrder(feature_table_map, [spec.dim for spec in self._specs])
        self.tables = self._make_tables(arguments, compute_device(kind, device))
        self._log_placement(bool(stochastic_rounding))
        self._ready_for: weakref.ref[Group] | None = None
        self._weighted = False
        self._variable: tuple[object, VariableBatch] | None = None
        self._logged: set[str] = set()
        self.start_counting(RecordCacheMetrics(*(record_cache_metrics or (False, False))), bool(gather_uvm_cache_stats))

    def _make_tables(self, arguments: Mapping[str, Any], device: torch.device) -> TableBatchedEmbedding:
        names = derive_table_names(arguments["table_names"], len(self._specs))
        rounding = bool(arguments["stochastic_rounding"])
        precisions, pooling = (self.weights_precision, self.cache_precision), self.pooling_mode
        configs = table_configs(self._specs, names, self._order.features, pooling, precisions, rounding)
        if pooling is PoolingMode.NONE and len({spec.dim for spec in self._specs}) > 1:
            raise ValueError("pooling_mode NONE gives rows of one dim, and the tables have several")
        share = arguments["cache_load_factor"], arguments["cache_sets"], arguments["cache_reserved_memory"]
        options = EmbeddingOptions(
            cache=cache_option(self._specs, configs, self._optimizer, device, *share),
            device=device,
            seed=torch.initial_seed(),  # leaves the generator unchanged, as FBGEMM's constructor does
            bounds_check_mode=self.bounds_check_mode.name,
            cache_policy=member(CacheAlgorithm, "cache_algorithm", arguments["cache_algorithm"]).name.lower(),
        )
        return TableBatchedEmbedding.from_options(configs, options, self._optimizer)

    def _log_placement(self, rounding: bool) -> None:
        wider = self.cache_precision is SparseType.FP32 is not self.weights_precision
        if rounding and wider and not all(spec.is_resident() for spec in self._specs):
            logger.warning(
                "stochastic_rounding=True has no effect on cached tables: FP32 weights in the cache are not rounded, "
                "and a row that leaves it is rounded to the nearest %s",
                self.weights_precision.name,
            )
        managed = [spec for spec in self._specs if spec.is_managed()]
        if managed:
            logger.warning(
                "EmbeddingLocation.MANAGED of %d tables: kernels here do not read host memory, so that their rows go "
                "through a cache of all rows, or of as many as the device has room for",
                len(managed),
            )

    @property
    def current_device(self) -> torch.device:
        """The device of the tables."""
        return self.tables.device

    @property
    def feature_table_map(self) -> list[int]:
        """The table of each feature."""
        return self._order.map

    @property
    def dims(self) -> list[int]:
        """Number of columns of each table."""
        return [spec.dim for spec in self._specs]

    @property
    def max_D(self) -> int:  # noqa: N802  # FBGEMM's name
        """The maximum of `dims`."""
        return max(self.dims)

    @property
    def total_D(self) -> int:  # noqa: N802  # FBGEMM's name
        """Number of columns of a pooled output."""
        return sum(self._order.dims)

    def _first_features(self) -> list[int]:
        return [self._order.map.index(table) for table in range(len(self._specs))]

    # ---- the batch

    @eager
    def forward(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None = None,
        feature_requires_grad: torch.Tensor | None = None,
        batch_size_per_feature_per_rank: BatchSizes | None = None,
        total_unique_indices: int | None = None,
        hash_zch_identities: torch.Tensor | None = None,
        hash_zch_runtime_meta: torch.Tensor | None = None,
        vbe_output: torch.Tensor | None = None,
        vbe_output_offsets: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Looks up a batch; the backward pass updates its rows. In eval mode, or without gradients, rows are only read.

        Args:
            indices: ids, int32 or int64 `[n]`, ordered by feature, on any device; fastest on the host.
            offsets: int32 or int64 `[F * B + 1]`; with batch sizes per feature and rank, `[sum of batch sizes + 1]`.
            per_sample_weights: float32 `[n]`, for pooled tables only.
            feature_requires_grad: `[F]`; per-sample weights of features with 0 get a gradient of 0.
            batch_size_per_feature_per_rank: F lists with a batch size for each rank, for pooled tables only.
            total_unique_indices: accepted without effect.
            hash_zch_identities, hash_zch_runtime_meta: must be None.
            vbe_output: memory for the output, in `output_dtype`; only with `batch_size_per_feature_per_rank`.
            vbe_output_offsets: start of the rows of each rank and feature in `vbe_output`, int64 `[ranks, F]`.

        Returns:
            Output in `output_dtype`, on the tables' device: `[B, total_D]`, or `[n, D]` with pooling_mode NONE. With
                `batch_size_per_feature_per_rank`, a flat tensor of the rows `[b, D]` of each rank and each feature;
                it is `vbe_output`, flattened, if that is passed.

        Raises:
            IndexError: an id is out of range, and bounds_check_mode is FATAL.
            ValueError: offsets are invalid, and bounds_check_mode is FATAL or NONE; or shapes do not match.
            NotImplementedError: an argument that must be None is not None.
            CacheTooSmallError: a table's cache holds fewer rows than the batch needs.
        """
        if total_unique_indices is not None and "total_unique_indices" not in self._logged:
            self._logged.add("total_unique_indices")
            logger.warning("total_unique_indices has no effect: the planner counts the rows of a batch")
        if hash_zch_identities is not None or hash_zch_runtime_meta is not None:
            name = "hash_zch_runtime_meta" if hash_zch_identities is None else "hash_zch_identities"
            raise NotImplementedError(f"{name} is not supported: there is no raw embedding streaming")
        together = [each is None for each in (vbe_output, vbe_output_offsets, batch_size_per_feature_per_rank)]
        if not all(together[:2]) and any(together):
            raise ValueError("vbe_output, vbe_output_offsets and batch_size_per_feature_per_rank go together")
        check_batch(indices)
        self._make_ready()
        self._weighted = per_sample_weights is not None  # `prefetch` gets no weights, but its plans depend on them
        batch = indices, offsets, per_sample_weights
        if self._average is not None and self.training and torch.is_grad_enabled():
            self._average.before_forward(self.tables, self._optimizer.step + 1)
        with self.count_forward():
            try:
                out = self._lookup(*batch, feature_requires_grad, batch_size_per_feature_per_rank)
            except ValueError as error:
                in_order = repair_batch(*batch) if self.bounds_check_mode in _REPAIRING_MODES else None
                if in_order is None:
                    raise
                if self.bounds_check_mode is BoundsCheckMode.WARNING:
                    warn(f"{error}; they were put in order, as FBGEMM does", InputWarning)
                out = self._lookup(*in_order, feature_requires_grad, batch_size_per_feature_per_rank)
        if self._gradient_bound is not None and out.requires_grad:
            out.register_hook(lambda gradient: gradient.clamp(-self._gradient_bound, self._gradient_bound))
        out = out if out.dtype == self._output else out.to(self._output)
        if vbe_output is None or vbe_output_offsets is None or batch_size_per_feature_per_rank is None:
            return out
        return self._variable_batch(batch_size_per_feature_per_rank).place_rows(out, vbe_output_offsets, vbe_output)

    def _lookup(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None,
        feature_requires_grad: torch.Tensor | None,
        sizes: BatchSizes | None,
    ) -> torch.Tensor:
        variable = None if sizes is None else self._variable_batch(sizes)
        if weights is not None:
            weights = weights.to(device=self.tables.device, dtype=torch.float32)
            if feature_requires_grad is not None and weights.requires_grad:
                weights = mask_weight_gradients(weights, feature_requires_grad, self._feature_bounds(offsets, variable))
        if variable is not None:
            offsets = variable.offsets(offsets)
        if self._order.same:
            out = self.tables(indices, offsets, weights)
        else:
            out = self._lookup_mixed(indices, offsets, weights)
        return out if variable is None else variable.output(out)

    def _lookup_mixed(self, indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """Looks up a batch whose features are not in table order."""
        keys = self._order.key_array
        size = self.tables.batch_size(offsets)
        batch = self.tables.queue.batch(offsets, indices, offsets, size, keys, weights)
        if self.pooling_mode is not PoolingMode.NONE:
            return self.tables.lookup_pooled(batch).index_select(1, self._order.column_indices(self.tables.device))
        of_features = dict(zip(self._order.keys, self.tables.lookup_features(batch), strict=True))
        return torch.cat([of_features[key] for key in range(len(of_features))])

    def _feature_bounds(self, offsets: torch.Tensor, variable: VariableBatch | None) -> torch.Tensor:
        """Returns each feature's first lookup, and the end of the last feature's lookups, int64 `[F + 1]`."""
        if variable is not None:
            return variable.feature_bounds(offsets).long()
        size = self.tables.batch_size(offsets)
        return offsets[::size].long() if size else offsets.new_zeros(len(self._order.map) + 1).long()

    def _variable_batch(self, sizes: BatchSizes) -> VariableBatch:
        """Returns the `VariableBatch` for these sizes; reuses the object of the last call if the sizes are equal."""
        if self.pooling_mode is PoolingMode.NONE:
            raise ValueError("batch_size_per_feature_per_rank needs a pooling_mode other than NONE")
        key = tuple(map(tuple, sizes))
        if self._variable is None or self._variable[0] != key:
            self._variable = key, VariableBatch(sizes, self._order.dims)
        return self._variable[1]

    def _make_ready(self) -> None:
        """Loads DEVICE and HOST tables whole into the cache, at the first use and whenever tables are reallocated."""
        group = self.tables.groups[0]
        if self._ready_for is None or self._ready_for() is not group:
            names = [table.name for table in self.tables.tables]
            make_resident(self.tables, [n for n, spec in zip(names, self._specs, strict=True) if spec.is_resident()])
            self._ready_for = weakref.ref(group)

    def prefetch(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        forward_stream: Any = None,
        batch_size_per_feature_per_rank: BatchSizes | None = None,
    ) -> None:
        """Plans the batch of a later training forward and starts to fetch its missing rows, in another thread.

        The plan assumes per-sample weights if the last forward had them. If the assumption is wrong, the forward plans
        the prefetched batches again.

        Args:
            indices, offsets, batch_size_per_feature_per_rank: same as for the forward, which finds the plan by the ids.
            forward_stream: accepted without effect; events order the copies.

        Raises:
            RuntimeError: 16 batches are already prefetched.
        """
        self._make_ready()
        if batch_size_per_feature_per_rank is not None:
            offsets = self._variable_batch(batch_size_per_feature_per_rank).offsets(offsets)
        size, keys = self.tables.batch_size(offsets), self._order.key_array
        joined = self._order.same and self.pooling_mode is PoolingMode.NONE
        prefetched = Prefetched(indices, offsets, size, keys, self._weighted, source=offsets, joined=joined)
        self.tables.queue.add(prefetched)


_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(SplitTableBatchedEmbeddingBagsCodegen.__init__).parameters.items()
}
