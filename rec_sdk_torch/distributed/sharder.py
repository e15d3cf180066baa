"""Base class of sharders, for TorchRec's planner and DistributedModelParallel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torchrec.distributed.embedding_types import BaseEmbeddingSharder, EmbeddingComputeKernel
from torchrec.distributed.types import ShardingEnv, ShardingEnv2D, ShardingType

from ..modules.collection import CachedCollection
from ..operators.devices.backends import parse_device
from ..runtime.host_groups import host_group, reaches_host, spans_world
from ..runtime.warn import ConfigurationWarning, warn
from .collectives import Exchange
from .consistency import RankSettings, collection_settings
from .placement import SHARDING_TYPES, Placement, placements_of
from .replicas import check_replicas
from .sharded import ShardedCollection
from .topology import LocalSize, check_local_size


class TableSharder(BaseEmbeddingSharder[Any]):
    """Sharder of collections of one class: row-wise, table-wise or data-parallel."""

    _type: type[torch.nn.Module]
    _sharded: type[ShardedCollection] = ShardedCollection

    def __init__(
        self,
        cpu_device: torch.device | str = "cpu",
        cpu_env: ShardingEnv | None = None,
        npu_device: torch.device | str | int | None = None,
        npu_env: ShardingEnv | None = None,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, Any] | None = None,
        *,
        local_size: LocalSize = None,
    ) -> None:
        """Creates a sharder.

        Args:
            cpu_device: the host; only "cpu" is allowed.
            cpu_env: sharding environment whose process group exchanges ids in host memory; None creates a gloo group.
            npu_device: the device of the caches, of any device type; None uses DistributedModelParallel's device.
            npu_env: sharding environment whose process group exchanges rows; None uses DistributedModelParallel's.
            fused_params: must be None or empty; pass optimizer options to `apply_optimizer_in_backward` instead.
            qcomm_codecs_registry: must be None or empty; rows are exchanged in float32.
            local_size: number of ranks on each machine; exchanges are then hierarchical. The ranks of a machine must be
                consecutive. "auto" reads torchrun's environment variables; None exchanges in one level.

        Raises:
            ValueError: `cpu_device` is not the host, or an option is not supported.
            TypeError: `local_size` is not a number.
        """
        if torch.device(cpu_device).type != "cpu":
            raise ValueError(f"cpu_device is {cpu_device!r}, expected the host: torch.device('cpu')")
        if fused_params:
            raise ValueError(
                f"fused_params has {sorted(fused_params)}, which these tables do not read: give options to "
                "apply_optimizer_in_backward and to the collection"
            )
        if qcomm_codecs_registry:
            raise ValueError("qcomm_codecs_registry is not supported: rows are exchanged in float32, leave it None")
        super().__init__()
        self._device = None if npu_device is None else parse_device(npu_device)
        self._ids_env, self._rows_env = cpu_env, npu_env
        self._local_size = check_local_size(local_size)

    @property
    def module_type(self) -> type[Any]:
        """The class of modules that this sharder shards; as in TorchRec, subclasses are excluded."""
        return self._type

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns the supported sharding types: row-wise, table-wise and data-parallel."""
        return list(SHARDING_TYPES)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Returns the fused kernel, or for data-parallel tables the dense kernel, which TorchRec's planner requires."""
        dense = sharding_type == ShardingType.DATA_PARALLEL.value
        return [(EmbeddingComputeKernel.DENSE if dense else EmbeddingComputeKernel.FUSED).value]

    def shardable_parameters(self, module: CachedCollection) -> dict[str, torch.nn.Parameter]:
        """Returns, by table name, a parameter of each whole table's shape on the meta device."""
        shown = {}
        for table in module.embedding.tables:
            data = torch.empty((table.num_embeddings, table.embedding_dim), dtype=table.weight_dtype, device="meta")
            shown[table.name] = torch.nn.Parameter(data, requires_grad=True)
        return shown

    def shard(
        self,
        module: CachedCollection,
        params: Any,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedCollection:
        """Shards a collection (collective).

        Raises:
            ValueError: there is no process group, process groups have different ranks, or the device or the plan does
                not fit. On all ranks, if tables, plans or `local_size` differ between ranks, or if a hierarchical
                all-to-all is not possible on these machines.
            TypeError: `module` is of another class.
        """
        if type(module) is not self._type:
            raise TypeError(f"{type(self).__name__} shards {self._type.__name__}, got {type(module).__name__}")
        if isinstance(env, ShardingEnv2D) and env.num_sharding_groups() > 1:
            raise ValueError(
                f"DMPCollection's sharding_group_size is {env.world_size} of {env.global_world_size} ranks: these "
                "tables have no replicas of groups of ranks, and are divided among all ranks. Use "
                "DistributedModelParallel, or a sharding_group_size of all ranks"
            )
        rows = (self._rows_env or env).process_group
        ids = rows if self._ids_env is None else self._ids_env.process_group
        if ids is None or rows is None:
            raise ValueError(
                "a process group is needed: ShardingEnv.from_process_group(torch.distributed.group.WORLD), after "
                "torch.distributed.init_process_group"
            )
        ranks = [torch.distributed.get_process_group_ranks(group) for group in (ids, rows)]
        if env.process_group is not None:
            ranks.append(torch.distributed.get_process_group_ranks(env.process_group))
        if any(each != ranks[0] for each in ranks):
            raise ValueError(f"cpu_env, npu_env and the model have process groups of ranks {ranks}: they must agree")
        if self._ids_env is None and (spans_world(rows) or not reaches_host(rows)):
            ids = host_group(rows, "ids")
        if not reaches_host(ids):
            raise ValueError("the process group of cpu_env does not exchange tensors in host memory: give it gloo")
        chosen = self._device if device is None else parse_device(device)
        if self._device is not None and chosen != self._device:
            raise ValueError(f"npu_device is {self._device}, DistributedModelParallel's device is {chosen}")
        exchange = Exchange(ids, rows, self._device_of(module, chosen))
        names = list(self.shardable_parameters(module))
        placements: list[Placement] = []
        collections: list[CachedCollection] = []

        def read_settings() -> RankSettings:
            collections.append(self._make_collection(module, exchange.device))
            tables = collections[0].embedding.tables
            placements.extend(placements_of(tables, params, exchange.rank, exchange.world_size))
            check_replicas(tables, placements)
            settings = collection_settings(collections[0], placements, module_fqn)
            settings[""]["local_size"] = repr(self._local_size)
            return settings

        exchange.register(
            f"collection {module_fqn!r}" if module_fqn else f"the collection of tables {names}", read_settings
        )
        exchange.set_local_size(self._local_size)
        exchange.connect()
        self._copy_rows(collections[0], module, placements, exchange)
        return self._sharded(collections[0], placements, exchange)

    def reshard(self, sharded_module: ShardedCollection, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises an error: `DistributedModelParallel.reshard` is not supported.

        Raises:
            NotImplementedError: always. To change the plan, save the tables and load them under the new plan.
        """
        names = [table.name for table in sharded_module.tables.configs]
        raise NotImplementedError(
            f"tables {names} stay where their plan has put them: save them with Saver, and load them into a model that "
            "is sharded by the other plan"
        )

    def _device_of(self, module: Any, device: torch.device | None) -> torch.device:
        """Returns the device for this rank's tables: `device`, else the module's, or the host for a meta module."""
        if device is None:
            return torch.device("cpu") if module.device.type == "meta" else module.device
        if device.type == "cpu" and module.device.type not in ("cpu", "meta"):
            names = [table.name for table in module.embedding.tables]
            warn(
                f"tables {names} are on {module.device}, but are sharded onto {device}, DistributedModelParallel's "
                f"default: give it device={str(module.device)!r}",
                ConfigurationWarning,
            )
        return device

    def _make_collection(self, module: Any, device: torch.device) -> CachedCollection:
        """Returns an unsharded collection with the tables of `module`, to be sharded onto `device`."""
        collection: CachedCollection = module
        return collection

    def _copy_rows(
        self, collection: CachedCollection, module: Any, placements: Sequence[Placement], exchange: Exchange
    ) -> None:
        """Copies the rows of `module` into `collection` if the two are different objects (collective)."""
