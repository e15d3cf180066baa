"""Planner that shards dynamic tables row-wise over all ranks and lets TorchRec plan the other tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import (
    Enumerator,
    Partitioner,
    PerfModel,
    Proposer,
    ShardEstimator,
    ShardingOption,
    Stats,
    StorageReservation,
)
from torchrec.distributed.sharding_plan import placement
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ModuleSharder,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
    ShardMetadata,
)
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, data_type_to_dtype

from ...runtime.warn import ConfigurationWarning, warn
from .enums import DEFAULT_INDEX_TYPE, DynamicEmbKernel
from .options import DynamicEmbTableOptions, align_to_table_size, bucket_layout, complete_initializer_args

_BATCH_SIZE = 512
_HBM_CAP, _DDR_CAP = 32 * 2**30, 128 * 2**30


@dataclass
class DynamicEmbParameterConstraints(ParameterConstraints):
    """TorchRec's constraints for a table, extended by dynamicemb's options.

    Attributes:
        use_dynamicemb: whether the table is dynamic; False makes it an index table.
        dynamicemb_options: options of a dynamic table.
    """

    use_dynamicemb: bool | None = False
    dynamicemb_options: DynamicEmbTableOptions | None = field(default_factory=DynamicEmbTableOptions)

    __hash__ = ParameterConstraints.__hash__


@dataclass
class DynamicEmbParameterSharding(ParameterSharding):
    """TorchRec's sharding of a table, extended by dynamicemb's options."""

    compute_kernel: str = EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value
    customized_compute_kernel: str | None = DynamicEmbKernel
    dist_type: str = "roundrobin"
    dynamicemb_options: DynamicEmbTableOptions | None = field(default_factory=DynamicEmbTableOptions)

    def get_additional_fused_params(self) -> dict[str, Any]:
        """Returns the values of the fields that this class adds to TorchRec's, by name."""
        known = {each.name for each in fields(ParameterSharding)}
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in known}


class DynamicEmbeddingEnumerator(EmbeddingEnumerator):
    """TorchRec's enumerator, which skips dynamic tables: they have one possible placement and their own memory."""

    def __init__(
        self,
        topology: Topology,
        batch_size: int | None = _BATCH_SIZE,
        constraints: dict[str, DynamicEmbParameterConstraints] | None = None,
        estimator: ShardEstimator | list[ShardEstimator] | None = None,
    ) -> None:
        super().__init__(topology, batch_size or _BATCH_SIZE, constraints, estimator)
        self._dynamic = {name for name, each in (constraints or {}).items() if getattr(each, "use_dynamicemb", False)}

    def enumerate(
        self, module: torch.nn.Module, sharders: list[ModuleSharder[torch.nn.Module]]
    ) -> list[ShardingOption]:
        """Returns the sharding options of tables that are not dynamic."""
        return [option for option in super().enumerate(module, sharders) if option.name not in self._dynamic]


def prepare_options(
    constraints: dict[str, DynamicEmbParameterConstraints] | None,
    eb_configs: Sequence[BaseEmbeddingConfig] | None,
    world_size: int,
) -> None:
    """Fills in the options of dynamic tables in place, as dynamicemb's planner does.

    Raises:
        ValueError: `constraints` and `eb_configs` do not name the same tables, or a bucket capacity is invalid.
    """
    if constraints is None or eb_configs is None:
        raise ValueError("constraints and eb_configs are needed")
    names = [config.name for config in eb_configs]
    if len(set(names)) < len(names) or set(names) != constraints.keys():
        raise ValueError(f"eb_configs has tables {names}, constraints {sorted(constraints)}: each table once in both")
    for config in eb_configs:
        options = constraints[config.name].dynamicemb_options
        if constraints[config.name].use_dynamicemb and options is not None:
            _prepare_table(config, options, world_size)


def _prepare_table(config: BaseEmbeddingConfig, options: DynamicEmbTableOptions, world_size: int) -> None:
    options.initializer_args = complete_initializer_args(options.initializer_args, embedding_config=config)
    buckets, options.bucket_capacity = bucket_layout(config, world_size, options.bucket_capacity)
    options.max_capacity = buckets * options.bucket_capacity
    options.local_hbm_for_values = math.ceil(options.global_hbm_for_values / world_size)
    first = options.max_capacity
    if options.init_capacity is not None:
        first = min(first, align_to_table_size(options.init_capacity, options.bucket_capacity))
    options.init_capacity = first
    options.dim = config.embedding_dim
    options.index_type = options.index_type or DEFAULT_INDEX_TYPE
    options.embedding_dtype = options.embedding_dtype or data_type_to_dtype(config.data_type)


class DynamicEmbeddingShardingPlanner:
    """Planner that shards dynamic tables row-wise over all ranks, and other tables as TorchRec's planner does."""

    def __init__(
        self,
        eb_configs: list[BaseEmbeddingConfig],
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        storage_reservation: StorageReservation | None = None,
        proposer: Proposer | list[Proposer] | None = None,
        partitioner: Partitioner | None = None,
        performance_model: PerfModel | None = None,
        stats: Stats | list[Stats] | None = None,
        constraints: dict[str, DynamicEmbParameterConstraints] | None = None,
        debug: bool = True,
    ) -> None:
        """Creates a planner and fills in the options of the dynamic tables.

        Args:
            eb_configs: configs of all tables of the model.
            constraints: constraints of each table, by name.

        TorchRec's `EmbeddingShardingPlanner`, which plans the tables that are not dynamic, takes all other arguments.

        Raises:
            ValueError: `constraints` and `eb_configs` do not name the same tables, or options are invalid.
        """
        self._world_size = dist.get_world_size()
        prepare_options(constraints, eb_configs, self._world_size)
        assert constraints is not None
        self._dynamic = {name: each for name, each in constraints.items() if each.use_dynamicemb}
        others = {name: each for name, each in constraints.items() if not each.use_dynamicemb}
        if topology is None:
            warn("the planner has no topology, and takes one of 32 GiB of device memory", ConfigurationWarning)
            kind = "cuda" if torch.cuda.is_available() else "cpu"
            local = get_local_size()
            topology = Topology(self._world_size, kind, _HBM_CAP, _DDR_CAP, local_world_size=local)
        self._topology = topology
        self._dims = {config.name: config.embedding_dim for config in eb_configs}
        planner_options = (storage_reservation, proposer, partitioner, performance_model, stats, others, debug)
        if enumerator is None:
            enumerator = DynamicEmbeddingEnumerator(topology, batch_size, constraints)
        self._planner = EmbeddingShardingPlanner(topology, batch_size, enumerator, *planner_options) if others else None

    def collective_plan(
        self,
        module: torch.nn.Module,
        sharders: list[ModuleSharder[torch.nn.Module]],
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Returns the sharding plan of all tables in `module` that one of the sharders supports (collective)."""
        plan = ShardingPlan({})
        if self._planner is not None:
            plan = self._planner.collective_plan(module, sharders, pg or dist.GroupMember.WORLD)
        for path, child in module.named_modules():
            sharder = next((each for each in sharders if isinstance(child, each.module_type)), None)
            names = [] if sharder is None else [n for n in sharder.shardable_parameters(child) if n in self._dynamic]
            for name in names:
                own = plan.plan.setdefault(path, EmbeddingModuleShardingPlan())
                own[name] = self._row_wise(name)
        return plan

    def _row_wise(self, name: str) -> DynamicEmbParameterSharding:
        options = self._dynamic[name].dynamicemb_options
        assert options is not None
        assert options.max_capacity is not None
        ranks = list(range(self._world_size))
        kind, local = self._topology.compute_device, self._topology.local_world_size
        shards = [
            ShardMetadata(
                shard_offsets=[rank * options.max_capacity, 0],
                shard_sizes=[options.max_capacity, self._dims[name]],
                placement=placement(kind, rank, local),
            )
            for rank in ranks
        ]
        return DynamicEmbParameterSharding(
            sharding_type=ShardingType.ROW_WISE.value,
            sharding_spec=EnumerableShardingSpec(shards),
            ranks=ranks,
            dist_type=options.dist_type,
            dynamicemb_options=options,
        )
